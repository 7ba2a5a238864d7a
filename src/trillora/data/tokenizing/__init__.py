"""Text to tokens, and tokens on disk."""
