"""Loading a model: find its files, then read its weights into sharded arrays."""
