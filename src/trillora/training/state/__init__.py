"""What a checkpoint holds: the progress of a run, and its arrays."""
