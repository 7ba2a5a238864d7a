"""Tokenized rows on disk: written once per content, tokenizer and options, then memory-mapped.

A store is a folder with three files. `tokens.bin` holds token ids (uint32, highest bit set if the token is trained).
`rows.bin` holds one record per row (`ROW`): the position of its tokens, its kind and its place in the data.
`store.json` describes both, with checksums. A store is renamed into place when it is complete, and verified when it is
opened. Example: a row of ids 5 6 7, of which 7 is trained, is stored as 00000005 00000006 80000007.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import numpy as np
from numpy.typing import NDArray

from trillora.data.rows import place
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.files.cache_dir import CacheUnwritable, writing_cache
from trillora.files.digests import bytes_digest, file_digest

TRAINED = np.uint32(1 << 31)
KINDS = ("chat", "pair", "text")
ROW = np.dtype(
    [
        ("start", "<i8"),  # in tokens.bin
        ("digest", "<u8"),  # of the row's content, the same in every format
        ("split", "<u8"),  # decides the part: the digest, or for a pair or a labelled answer the prompt's digest
        ("line", "<i8"),
        ("nth", "<i4"),  # of the rows on that line
        ("length", "<i4"),  # in tokens
        ("first", "<i4"),  # tokens of the chosen side of a pair; 0: not a pair
        ("prompt", "<i4"),  # tokens before the answer, of pairs, labelled answers and untrained thinking; else 0
        ("trained", "<i4"),  # number of targets
        ("weight", "<f4"),  # of these in the loss; below zero for a bad answer
        ("name", "<i4"),  # index into the description's list of files and archive members
        ("source", "<i2"),  # entry of data.path
        ("kind", "<i1"),
        ("cut", "<i1"),  # whether the row was shortened
        ("shape", "<i1"),  # index into the description's list of shapes of conversations
        ("turns", "<i4"),  # of a conversation
    ]
)
MAKING = ".making-"  # a folder that is being written: this, the name of the store, a random part
UNUSED_DAYS = 30  # a store that was not opened for this long is removed


@dataclass(frozen=True)
class Store:
    """An open store."""

    folder: Path
    tokens: NDArray[np.uint32]
    rows: NDArray[np.void]
    facts: dict[str, Any]  # store.json: archive members, formats, problems, digests of files
    files: list[str]  # their current names

    def shape(self, row: int) -> str:
        """What kind of conversation the row is; "" for other rows."""
        return str(self.facts["shapes"][self.rows["shape"][row]])

    def place(self, row: int) -> str:
        file, member = self.facts["names"][self.rows["name"][row]]
        return place(self.files[file], member, int(self.rows["line"][row]), int(self.rows["nth"][row]))


class StoreWriter:
    """Writes a store into a temporary folder, which `finish` renames."""

    def __init__(self, folder: Path) -> None:
        self._target = folder
        with writing_cache(folder.parent):
            self._folder = Path(tempfile.mkdtemp(prefix=f"{MAKING}{folder.name}-", dir=folder.parent))
            self._tokens = open(self._folder / "tokens.bin", "wb")  # noqa: SIM115  (closed by finish or discard)
            self._rows = open(self._folder / "rows.bin", "wb")  # noqa: SIM115
        self._num_tokens = 0

    def add(self, documents: Sequence[TokenizedDocument], rows: NDArray[np.void]) -> None:
        """Appends documents and their records, whose start, lengths and trained are filled in here."""
        if not documents:
            return
        lengths = np.array([len(document) for document in documents])
        rows["length"] = lengths
        rows["start"] = self._num_tokens + np.cumsum(lengths) - lengths
        rows["trained"] = [document.num_supervised for document in documents]
        rows["first"] = [document.first for document in documents]
        rows["prompt"] = [document.prompt for document in documents]
        tokens = np.concatenate([document.tokens for document in documents]).view(np.uint32)
        trained = np.concatenate([document.supervised for document in documents])
        with writing_cache(self._target.parent):
            self._tokens.write(np.where(trained, tokens | TRAINED, tokens).data)
            self._rows.write(rows.tobytes())
        self._num_tokens += int(lengths.sum())

    def finish(self, facts: Mapping[str, object]) -> None:
        """Flushes everything to disk, then renames the folder."""
        with writing_cache(self._target.parent):
            for file in (self._tokens, self._rows):
                file.flush()
                os.fsync(file.fileno())
                file.close()
            sums = {name: file_digest(self._folder / name) for name in ("tokens.bin", "rows.bin")}
            text = json.dumps({**facts, "sha256": sums}).encode()
            (self._folder / "store.json").write_bytes(bytes_digest(text).encode() + b"\n" + text)
            if self._target.exists():
                shutil.rmtree(self._target)  # it failed verification
            os.replace(self._folder, self._target)
        with contextlib.suppress(OSError):  # another process may remove the same
            _remove_unused(self._target.parent)

    def discard(self) -> None:
        """Removes an unfinished store; does nothing after `finish`."""
        for file in (self._tokens, self._rows):
            with contextlib.suppress(OSError):  # closing writes what is buffered, which fails again on a full disk
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def locked_store(folder: Path) -> Iterator[None]:
    """Others that need the same store wait for the process that creates it. A store in a cache that cannot be written
    needs no lock: it does not change."""
    lock = filelock.FileLock(f"{folder}.lock")
    try:
        with writing_cache(folder.parent):
            folder.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
    except CacheUnwritable:
        if not os.path.exists(folder / "store.json"):
            raise
    try:
        yield
    finally:
        lock.release()


def open_store(folder: Path, files: list[str]) -> Store | None:
    """The store of these files, or None if there is none or a checksum differs."""
    try:
        digest, _, text = (folder / "store.json").read_bytes().partition(b"\n")
        if bytes_digest(text).encode() != digest:
            return None
        facts = json.loads(text)
        if any(file_digest(folder / name) != expected for name, expected in facts["sha256"].items()):
            return None
        with contextlib.suppress(OSError):  # a cache may be read-only
            os.utime(folder / "store.json")  # the time of the last use, for `_remove_unused`
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    tokens, rows = _mapped(folder / "tokens.bin", np.dtype("<u4")), _mapped(folder / "rows.bin", ROW)
    return Store(folder, tokens, rows, facts, files)


def _mapped(file: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, "r") if file.stat().st_size else np.empty(0, dtype)


def _remove_unused(parent: Path) -> None:
    oldest = time.time() - UNUSED_DAYS * 86400
    for entry in parent.iterdir():
        mark = entry / "store.json"
        if (mark if mark.exists() else entry).stat().st_mtime >= oldest:
            continue
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        elif not entry.with_suffix("").exists():
            entry.unlink(missing_ok=True)  # the lock of a removed store
