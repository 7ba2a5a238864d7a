"""Kernels for NVIDIA GPUs (`engine.kernels: fused`): what is between products, in one pass over each wide array."""
