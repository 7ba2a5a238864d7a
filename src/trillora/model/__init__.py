"""The only home of torch, torchax and transformers' modelling code: checkpoints in, pure JAX functions out."""
