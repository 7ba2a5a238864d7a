"""Losses of preferences, from log-probabilities of tokens."""
