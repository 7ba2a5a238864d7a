"""What a step minimizes: the functions that call the model, and losses that people write."""
