"""The worker process that decodes Parquet files. They are untrusted: few bytes may stand for many gigabytes.

A page of 37 kB may decompress to a gigabyte, a list of 50 bytes may have a billion elements, and the sizes in the file
may be wrong. So not the file but the memory of this process is limited. It holds no file: it requests bytes from the
parent, which compares them with the file's digest. All messages are frames (`frames`) whose first part is their kind:

    parent   open <size> [<column> ...]  a file of this many bytes, and the columns to read if not all
    worker   read <position> <size>      parent: <bytes>
    worker   rows <row> <row> ...        each row b"+" and its JSON, or b"-" and a JSON list [what is wrong, what to do]
    worker   end [<what> <do>]           with the reason if the rest of the file cannot be decoded
    worker   exit [<what> <do>]          the same, from a worker that ends now, because it did not get its memory back
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from trillora.child_process import read_frame, write_frame
from trillora.data.reading.cursor import FETCH_AGAIN, MAX_COLUMNS, Cursor
from trillora.data.rows import RawRow

BYTES_ABOVE_START = 1 << 30
WRITE_AGAIN = "remove the file; if you trust it, write it again with smaller row groups, or as .jsonl"
SECONDS_PER_FRAME = 30.0  # of processor time
_BATCH_BYTES = 16 << 20  # decoded at a time, by the sizes that the file states
_BATCH_ROWS = 256
_BUFFER = 1 << 20  # bytes of a column that are read at a time
_FRAME_BYTES = 1 << 20


class FileRefused(Exception):
    """The rest of the file is not decoded."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what)
        self.what = what
        self.do = do


class RemoteFile(io.RawIOBase):
    """A file whose bytes are requested from the parent."""

    def __init__(self, incoming: BinaryIO, outgoing: BinaryIO, size: int) -> None:
        self._incoming, self._outgoing = incoming, outgoing
        self._size, self._position = size, 0

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._position)
        size = left if size < 0 else min(size, left)
        if not size:
            return b""
        _restart_clock()
        write_frame(self._outgoing, [b"read", str(self._position).encode(), str(size).encode()])
        reply = read_frame(self._incoming)
        if reply is None:
            os._exit(1)  # the parent is gone
        self._position += len(reply[0])
        return reply[0]

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        return self._position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True


def main() -> None:
    """Serve file after file until standard input ends."""
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # printed text must not mix with the frames
    try:
        import pyarrow.parquet  # noqa: F401  (before the limit: its libraries are large)
    except ImportError:
        write_frame(outgoing, [b"missing"])
        return
    at_start = _address_space()
    _limit_memory(at_start + BYTES_ABOVE_START)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    write_frame(outgoing, [b"ready"])
    while (frame := read_frame(incoming)) is not None:
        reason: list[bytes] = []
        try:
            for some in _portions(_rows(RemoteFile(incoming, outgoing, int(frame[1])), frame[2:])):
                _restart_clock()
                write_frame(outgoing, [b"rows", *some])
        except FileRefused as error:
            reason = [error.what.encode(), error.do.encode()]
        is_used_up = _address_space() > at_start + BYTES_ABOVE_START // 4
        write_frame(outgoing, [b"exit" if is_used_up else b"end", *reason])
        if is_used_up:
            return


def _portions(rows: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Rows in lists worth sending. If the file is refused, the rows before that come first."""
    some: list[bytes] = []
    size = 0
    refused = None
    try:
        for row in rows:
            some.append(row)
            size += len(row)
            if size >= _FRAME_BYTES:
                yield some
                some, size = [], 0
    except FileRefused as error:
        refused = error
    yield some
    if refused is not None:
        raise refused


def _rows(file: RemoteFile, columns: list[bytes]) -> Iterator[bytes]:
    import pyarrow
    import pyarrow.parquet

    at = Cursor()
    wanted = [name.decode() for name in columns] or None
    try:
        table = pyarrow.parquet.ParquetFile(
            file,
            pre_buffer=False,
            buffer_size=_BUFFER,
            page_checksum_verification=True,  # if the file has checksums
        )
        _check_columns(table)
        for group in range(table.num_row_groups):
            facts = table.metadata.row_group(group)
            row_bytes = max(1, facts.total_byte_size // max(1, facts.num_rows))
            size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes))
            for batch in table.iter_batches(size, row_groups=[group], columns=wanted, use_threads=False):
                for record in _records(batch):
                    if isinstance(record, dict):
                        row = at.record(record)
                    else:
                        row = at.fault(f"This record cannot be read: {record}.", "correct or remove it in the source")
                    yield b"+" + row.raw if isinstance(row, RawRow) else b"-" + json.dumps([row.what, row.do]).encode()
    except MemoryError:
        what = f"Decoding this Parquet file needs more than {BYTES_ABOVE_START >> 30} GiB of memory."
        raise FileRefused(what, WRITE_AGAIN) from None
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:200]
        what = f"This is not a Parquet file, or it is damaged: {reason.rstrip('.')}."
        raise FileRefused(what, FETCH_AGAIN) from None


def _check_columns(table: Any) -> None:
    num_columns, names = table.metadata.num_columns, table.schema_arrow.names
    twice = sorted({name for name in names if names.count(name) > 1}) if num_columns <= MAX_COLUMNS else []
    if not names or twice or num_columns > MAX_COLUMNS:
        has = f"two columns called {twice[0]!r}" if twice else f"{num_columns:,} columns; the limit is {MAX_COLUMNS}"
        what = f"The table has {has}." if names else "The table has no column."
        raise FileRefused(what, "keep only the columns you need, each with its own name")


def _records(batch: Any) -> Iterable[dict[str, Any] | Exception]:
    try:
        return batch.to_pylist()
    except (ValueError, OverflowError) as error:  # text that is not UTF-8, a date out of range
        if batch.num_rows == 1:
            return [error]
        return (record for number in range(batch.num_rows) for record in _records(batch.slice(number, 1)))


def _restart_clock() -> None:
    """The kernel ends the process if it neither sends rows nor requests bytes for this long."""
    signal.setitimer(signal.ITIMER_PROF, SECONDS_PER_FRAME)


def _address_space() -> int:
    """Bytes of this process; 0 where the system enforces no limit on them."""
    if sys.platform != "linux":
        return 0
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _limit_memory(num_bytes: int) -> None:
    if sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)  # batch systems set one, which only root may raise
        limit = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
