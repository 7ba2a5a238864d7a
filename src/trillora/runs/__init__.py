"""A run on disk: what training writes, and what everything after training reads."""
