"""The page of a run, made from its folder alone."""
