"""Reads a file that may be damaged or hostile: a regular file, up to a number of bytes or to the size of the memory,
without waiting."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from trillora.errors import TrilloraError

_BLOCK = 1 << 20  # bytes
_SURELY_FITS = 1 << 28  # bytes


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


def read_whole(file: Path) -> bytes:
    """The bytes of a file that may be large, such as weights. One that does not fit into memory is a TrilloraError."""
    size = os.stat(file).st_size
    try:
        if size > _SURELY_FITS and size > _memory():
            raise MemoryError
        return read_bounded(file, size)
    except MemoryError as error:
        raise TrilloraError(
            f"This file does not fit into the memory of this machine: it has {size / 1e9:.1f} GB.",
            where=str(file),
            do="use a machine with more memory; or, if it should be much smaller, restore it from a copy",
        ) from error
    except ValueError as error:
        raise TrilloraError(
            f"This file cannot be read: {error}.", where=str(file), do="restore it from a copy"
        ) from error


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)
