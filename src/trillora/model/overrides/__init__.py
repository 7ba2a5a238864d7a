"""Our functions in place of transformers' and torchax' own."""
