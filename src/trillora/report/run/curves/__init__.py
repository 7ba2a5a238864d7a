"""The curves of a run: where their lines and labels lie."""
