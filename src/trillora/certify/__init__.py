"""Proofs that an adapter or an export is what was trained."""
