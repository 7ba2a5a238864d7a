"""From a hub id, a folder or the embedded model to sharded arrays."""
