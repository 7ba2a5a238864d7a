"""The recipe: what may be written in it, and how it is read and resolved."""
