"""Text from a model with an adapter."""
