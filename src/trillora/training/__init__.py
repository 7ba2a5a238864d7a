"""A training run from start to adapter."""
