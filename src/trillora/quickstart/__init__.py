"""Code and data of `trillora quickstart`."""
