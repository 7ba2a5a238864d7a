"""Files: atomic writes, storage on disk or at an address, the cache folder."""
