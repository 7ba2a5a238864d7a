"""Files: atomic writes, checkpoint storage on disk or at a URL, the hub, digests, the cache folder."""
