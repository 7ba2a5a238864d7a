"""Unpacks a tar file that another machine made: regular files and folders, below one folder, and nothing else.

    unpack(Path("chat-results.tar"), Path("results"))

All entries are checked before the first file is written. `TarFile.extractall(filter="data")` is not used: before Python
3.11.13, 3.12.11 and 3.13.4 its links can write anywhere (CVE-2025-4517), and it has no limits.
"""

from __future__ import annotations

import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from trillora.errors import TrilloraError
from trillora.files.user_path import MAX_NAME, MAX_PATH
from trillora.safe_text import visible_line

MAX_ENTRIES = 100_000
_BLOCK = 1 << 20  # bytes
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
}


def unpack(archive: Path, folder: Path) -> None:
    """Writes the files of an uncompressed tar file into `folder`."""
    try:
        with open(archive, "rb") as file:
            tar = tarfile.open(fileobj=cast(BinaryIO, _Bounded(file)), mode="r:")  # noqa: SIM115  # closed with file
            entries = list(_checked(tar, archive.stat().st_size))
            for path, entry in entries:
                _write(tar, entry, folder.joinpath(*path))
    except (tarfile.TarError, EOFError, ValueError, RecursionError) as error:
        do = f"look at it with `tar -tvf {archive.name}`: the machine that made it may not be what you think"
        raise TrilloraError(f"This archive is not unpacked: {error}.", where=str(archive), do=do) from error


class _Bounded:
    """A file of which large blocks are not read: `tarfile` would read an extended header of any size."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        if size > _BLOCK:
            raise ValueError(f"it has a header of {size:,} bytes")
        return self._file.read(size)


def _checked(tar: tarfile.TarFile, most_bytes: int) -> Iterator[tuple[tuple[str, ...], tarfile.TarInfo]]:
    """Every entry with the parts of its path. Raises ValueError for one that an archive of ours does not have."""
    num_bytes = 0
    for number, entry in enumerate(tar):
        if number >= MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES:,} entries")
        if (problem := _problem(entry)) is not None:
            raise ValueError(f"its entry {visible_line(entry.name[:200])} {problem}")
        num_bytes += entry.size
        if num_bytes > most_bytes:
            raise ValueError("its entries are larger than itself: it is cut, or made to deceive")
        yield tuple(part for part in entry.name.split("/") if part not in ("", ".")), entry


def _problem(entry: tarfile.TarInfo) -> str | None:
    if entry.type in _KINDS:
        return f"is {_KINDS[entry.type]}"
    if entry.type not in (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE) or entry.sparse is not None:
        return "is neither a plain file nor a folder"
    if entry.size < 0 or (entry.isdir() and entry.size):
        return "has a wrong size"
    parts = re.split(r"[/\\]", entry.name)
    if parts[0] == "" or re.match("[A-Za-z]:", entry.name):
        return "has an absolute path"
    if ".." in parts:
        return 'has ".." in its path'
    if "\\" in entry.name or not entry.name.isprintable():
        return "has a backslash or a control character in its name"
    if max(len(os.fsencode(part)) for part in parts) > MAX_NAME or len(os.fsencode(entry.name)) > MAX_PATH // 2:
        return "has a name that is too long"
    return None


def _write(tar: tarfile.TarFile, entry: tarfile.TarInfo, target: Path) -> None:
    if entry.isdir():
        target.mkdir(parents=True, exist_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)  # of an earlier download
    source = tar.extractfile(entry)
    assert source is not None
    with source, open(target, "xb") as file:
        shutil.copyfileobj(source, file, _BLOCK)
        if file.tell() != entry.size:
            raise ValueError(f"it ends inside {visible_line(entry.name)}")
