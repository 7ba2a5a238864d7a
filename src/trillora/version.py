"""The version and the address of the source, in one place."""

__version__ = "0.2.0"
REPOSITORY = "https://github.com/trillora/trillora"
