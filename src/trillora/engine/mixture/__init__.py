"""Jitted arithmetic: jax and optax only. No torch, no files, no configuration."""
