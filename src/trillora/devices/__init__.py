"""Chips, slices and meshes of devices."""
