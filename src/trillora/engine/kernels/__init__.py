"""Kernels for NVIDIA GPUs (`engine.kernels: fused`): sums of matmuls, and what is between matmuls, in one pass over
each wide array."""
