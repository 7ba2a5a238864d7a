"""Checkpoints whose weights are stored quantized: MXFP4, float8, bitsandbytes, GPTQ, AWQ, compressed-tensors."""
