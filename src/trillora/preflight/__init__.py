"""Preflight: whether a run fits, how long it takes and what to change, asked of the TPU compiler before renting one."""
