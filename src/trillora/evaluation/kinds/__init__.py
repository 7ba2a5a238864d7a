"""Kinds of test rows: with an expected answer, with choices, with answers to compare."""
