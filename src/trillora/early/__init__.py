"""The first seconds, before jax, torch and transformers are imported: what a person gets wrong, and new recipes."""
