"""Atomic file writes: after a crash or power loss a file has its old or its new content, never a part of it.

    write_file(run / "run.json", text)

writes `.run.json.making-<process>-<thread>` next to the target, flushes it to the disk, renames it, and flushes the
folder. Errors are OSError: the caller knows what the file is for.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_MAKING = ".making-"
_ABANDONED = 86_400  # seconds without a change of a folder whose process is not known to be alive or dead
# From file systems that cannot flush a folder: shared folders of virtual machines, old FUSE drivers.
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_NOT_REGULAR = {errno.ELOOP, errno.ENXIO}  # a link; a named pipe without a reader


def write_file(path: Path, data: bytes | str, *, mode: int = 0o666) -> None:
    """Writes or replaces a file. If this fails, the old file is unchanged. `mode`: who may read and write it."""
    # With process and thread in the name, two writers of one file cannot mix their bytes.
    making = path.parent / f".{path.name}{_MAKING}{os.getpid()}-{threading.get_ident()}"
    try:
        write_synced(making, data.encode() if isinstance(data, str) else data, mode)
        os.replace(making, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(making)
        raise
    sync_folder(path.parent)


def write_synced(path: Path, data: bytes, mode: int = 0o666) -> None:
    """Writes a file and flushes it to the disk. Its name is durable only after `sync_folder`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), mode)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def append_file(path: Path, data: bytes) -> None:
    """Adds bytes at the end of a regular file, which is created if it is missing. If this fails, the file is as before.
    Links are not followed: a run must not write to a file outside its folder."""
    # Without O_NONBLOCK, opening a named pipe waits for a reader.
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno in _NOT_REGULAR:
            raise OSError(error.errno, "it is a link or not a regular file", str(path)) from error
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a link or not a regular file", str(path))
        try:
            _write_all(descriptor, data)
        except OSError:
            with suppress(OSError):
                os.ftruncate(descriptor, found.st_size)
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]  # os.write may write only a part


def sync_folder(path: Path) -> None:
    """Flushes the names in a folder, so that created, renamed and removed files survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Creates a folder and its missing parents, and flushes each of them."""
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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A hidden folder to write files into. It becomes `path` at the end of the block, when all its files are on the
    disk; if the block raises, nothing remains. What a killed process left is removed by the next one with the same
    `path`. `path` must not exist, or be an empty folder."""
    make_folder(path.parent)
    _remove_abandoned(path)
    making = path.parent / f".{path.name}{_MAKING}{os.getpid()}-{threading.get_ident()}-{_machine()}"
    shutil.rmtree(making, ignore_errors=True)  # left by a killed process with the same id
    try:
        os.mkdir(making)
        yield making
        for folder, _, files in os.walk(making):
            for file in files:
                descriptor = os.open(os.path.join(folder, file), os.O_RDONLY)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            sync_folder(Path(folder))
        os.rename(making, path)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise
    sync_folder(path.parent)


def _remove_abandoned(path: Path) -> None:
    """Removes hidden folders for `path` whose process is dead. Of a process of another machine, or whose number was
    given to another one, that is not known; then a day without a change counts as death."""
    pattern = re.compile(rf"\.{re.escape(path.name)}{re.escape(_MAKING)}(\d{{1,9}})-\d+(?:-([0-9a-f]{{8}}))?")
    with os.scandir(path.parent) as entries:
        found = [(e, m) for e in entries if (m := pattern.fullmatch(e.name)) and e.is_dir(follow_symlinks=False)]
    for entry, match in found:
        is_dead = match[2] == _machine() and not _is_running(int(match[1]))
        if is_dead or time.time() - _last_change(entry.path) > _ABANDONED:
            shutil.rmtree(entry.path, ignore_errors=True)


def _machine() -> str:
    """Where process ids have the same meaning: this machine, or this container."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {namespace}".encode()).hexdigest()[:8]


def _is_running(process: int) -> bool:
    import psutil

    return bool(psutil.pid_exists(process))


def _last_change(folder: str) -> float:
    """The newest time of a folder and what is in it, in seconds since 1970."""
    times = [os.stat(folder).st_mtime]
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with suppress(OSError):  # removed meanwhile
                times.append(os.lstat(os.path.join(parent, name)).st_mtime)
    return max(times)


def remove_unfinished(folder: Path) -> list[str]:
    """Removes the temporary files of killed `write_file` calls and returns their names. Only for the folder's owner."""
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if entry.name.startswith(".") and _MAKING in entry.name)
    for name in (names := [name for name in names if os.path.isfile(folder / name)]):
        os.unlink(folder / name)
    return names
