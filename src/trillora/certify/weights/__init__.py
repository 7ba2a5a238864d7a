"""The weights of an export against what was trained, value by value."""
