"""Environment variables that a new process keeps, in tests of what a user sees."""

from __future__ import annotations

# These are needed to find files, and shorten compilation; everything else that conftest.py sets could hide a warning.
FILES = ("PATH", "HOME", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
