"""Reports steps that take far longer than the others, with what the run is waiting for."""
