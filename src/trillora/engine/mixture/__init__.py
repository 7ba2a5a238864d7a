"""Experts: tokens sorted by expert, and products of groups of rows with the matrix of their group."""
