"""Taking a recipe to rented hardware: a bundle of all its files, notebooks for Colab and Kaggle, Cloud TPUs."""
