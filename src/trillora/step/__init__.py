"""The training step: built from shapes, tuned to the devices, compiled once."""
