"""Findings that `trillora quickstart` trains and evaluates on. tools/quickstart_data.py writes them; see NOTICE."""
