"""The web page of `trillora serve --page`."""
