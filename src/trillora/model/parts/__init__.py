"""What an adapter may have in addition to LoRA of linear layers."""
