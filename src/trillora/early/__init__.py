"""What a person gets wrong, found before jax, torch and transformers are imported: paths, runs, data, LoRA targets."""
