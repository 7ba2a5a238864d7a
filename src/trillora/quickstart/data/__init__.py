"""The findings `trillora quickstart` trains and tests on, made by tools/quickstart_data.py; see NOTICE."""
