"""Reads a file that may be damaged or hostile: a regular file, up to a number of bytes, without waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_BLOCK = 1 << 20  # bytes


def read_bounded(file: Path, max_bytes: int) -> bytes:
    """The bytes of a regular file. Raises ValueError for a device, a pipe, or a file that is too large."""
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        parts, size = [], 0
        while block := stream.read(_BLOCK):
            parts.append(block)
            size += len(block)
            if size > max_bytes:
                raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    return b"".join(parts)
