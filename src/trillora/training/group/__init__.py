"""Runs that train several adapters together on one base: phases, sweeps, and the search for a learning rate."""
