"""Work on finished adapters: merging several to one."""
