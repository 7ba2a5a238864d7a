"""Experts: tokens sorted by expert, and matmuls of groups of rows with the matrix of their group."""
