"""The report of a run: an HTML page built from its folder."""
