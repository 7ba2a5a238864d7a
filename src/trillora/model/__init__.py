"""The model: turns a checkpoint into pure JAX functions.

Only this package imports torch, torchax and transformers.
"""
