"""Kernels for NVIDIA GPUs (`engine.kernels: fused`): sums of products, and what is between products, in one pass over
each wide array."""
