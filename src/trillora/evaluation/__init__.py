"""Scores of a run on data it was not trained on."""
