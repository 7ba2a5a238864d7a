"""The data report: one screen and one page."""
