"""The entries of a run: what is trained together, how its step runs, and its programs."""
