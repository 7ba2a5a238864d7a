"""A finished adapter in other forms: merged into its base model, as GGUF, for Ollama, on the hub."""
