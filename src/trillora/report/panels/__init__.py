"""Pictures of a run that are drawn again and again: in a terminal, and in a notebook."""
