"""The first run: code and data."""
