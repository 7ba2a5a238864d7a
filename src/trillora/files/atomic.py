"""Files that are whole or not there, also after a power loss.

A file is written under a hidden name beside its place, flushed to the disk, renamed, and the folder that holds the name
is flushed too. Errors stay OSError: the caller knows what the file was for.
"""

from __future__ import annotations

import errno
import os
import threading
from contextlib import suppress
from pathlib import Path

_MAKING = ".making-"
# Some file systems (shared folders of virtual machines, old FUSE drivers) cannot flush a folder and say so.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


def write_file(path: Path, data: bytes | str) -> None:
    """Puts a file in place, or leaves what was there before."""
    # Process and thread in the name: two writers of one file must not mix their bytes.
    making = path.parent / f".{path.name}{_MAKING}{os.getpid()}-{threading.get_ident()}"
    try:
        write_synced(making, data.encode() if isinstance(data, str) else data)
        os.replace(making, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(making)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and flushes it to the disk; its name is not durable before its folder is flushed."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]  # a write may take less than it was given
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flushes the names in a folder: what was created, renamed or removed there stays so."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """The folder and those above it, each flushed into the one that holds it."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            if not os.path.isdir(folder):
                raise
        sync_folder(folder.parent)


def remove_unfinished(folder: Path) -> list[str]:
    """Removes what killed `write_file` calls left in a folder; only for the one process that owns it. Names them."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.startswith(".") and _MAKING in entry.name)
    for name in (names := [name for name in names if os.path.isfile(folder / name)]):
        os.unlink(folder / name)
    return names
