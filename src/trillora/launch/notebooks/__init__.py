"""Notebooks that train a recipe on Colab and Kaggle, and the programs of Google and Kaggle that run them there."""
