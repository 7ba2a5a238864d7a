"""The folders that the environment gives: the cache, and a temporary one in its place.

The cache has files that Trillora can recreate: converted models, tokenized data, compiled programs. One that is full or
cannot be written never stops a run:

    folder = with_cache(lambda root: converted(root / "smollm2"), say=print)

calls the function with ~/.cache/trillora. If it raises `CacheUnwritable`, it is called again with a temporary folder,
which is removed when the process ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

from trillora.errors import TrilloraError

T = TypeVar("T")
_BLOCK = 4096  # bytes; a full disk may still take a file that is empty


class CacheUnwritable(TrilloraError):
    """A file of the cache cannot be written."""


def cache_root() -> Path:
    """$TRILLORA_CACHE, else ~/.cache/trillora."""
    chosen = os.environ.get("TRILLORA_CACHE")
    try:
        return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "trillora"
    except RuntimeError as error:  # there is no HOME, and the system does not know the user
        what = f"There is no folder for the cache: {str(error).rstrip('.')}."
        do = "set HOME to a folder that you can write to, for example: export HOME=/tmp/home"
        raise TrilloraError(what, where="TRILLORA_CACHE" if chosen else "HOME", do=do) from None


def with_cache(work: Callable[[Path], T], say: Callable[[str], None]) -> T:
    """The result of `work` with the cache, or else with a temporary folder. `say` explains that to the user."""
    try:
        return work(cache_root())
    except CacheUnwritable as error:
        folder = _temporary_cache(os.getpid())
        say(f"{error.what} A temporary folder is used instead. To avoid this, {error.do}.")
    return work(folder)


@contextmanager
def writing_cache(folder: Path) -> Iterator[None]:
    """Turns an error of the system into `CacheUnwritable`."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of a library: no error of the system
            raise
        what = f"The cache folder {folder} cannot be written: {error.strerror or error}."
        do = "free some disk space there, or set TRILLORA_CACHE to a folder that you can write to"
        raise CacheUnwritable(what, where=str(error.filename or folder), do=do) from error


def why_unwritable(folder: Path) -> str | None:
    """The system's reason why no file can be created in a folder, or None. If it does not exist yet, its nearest parent
    decides."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_BLOCK))
    except OSError as error:
        return error.strerror or str(error)
    return None


@cache
def _temporary_cache(process: int) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="trillora-cache-"))

    def remove() -> None:
        if os.getpid() == process:  # a forked process shares the list of what to do at exit
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder
