"""Devices: chips, TPU slices, the mesh, and the versions of the packages that drive them."""
