"""Preflight: whether a run fits, how long it takes and what to change, from the TPU compiler, without a TPU."""
