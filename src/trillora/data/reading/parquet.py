"""Rows of Parquet files, decoded in a process with limited memory (`parquet_worker`)."""

from __future__ import annotations

import contextlib
import io
import json
import signal
import subprocess
from collections.abc import Iterator

from trillora.child_process import bare_environment, isolated_python, read_frame, write_frame
from trillora.data.reading.cursor import FETCH_AGAIN, Cursor
from trillora.data.reading.files import FileKind
from trillora.data.reading.parquet_worker import SECONDS_PER_FRAME, WRITE_AGAIN
from trillora.data.reading.streams import Damage, Meter, RawFile, Stream, decompressed, read_up_to
from trillora.data.rows import RowsOfFile
from trillora.errors import TrilloraError

MAX_HELD_PARQUET = 256 << 20  # inside an archive, a Parquet file is read into memory: its index is at its end
_PROGRAM = "from trillora.data.reading.parquet_worker import main; main()"
_ARROW = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # others reserve address space, which the limit counts


class ParquetDecoder:
    """The worker process. It is started by the first Parquet file and used for all of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ParquetDecoder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rows(
        self, source: Stream, kind: FileKind, at: Cursor, meter: Meter, columns: tuple[str, ...] = ()
    ) -> RowsOfFile:
        """The rows of one file, with these columns if any are given. They may have as many bytes as the content of a
        compressed file of this size."""
        file, size = _whole_file(source, kind, meter)
        num_bytes = 0
        for row in self._decoded(file, size, columns):
            num_bytes += len(row) - 1
            meter.produce(len(row) - 1, of_stream=num_bytes, from_bytes=size)
            yield at.row(row[1:], len(row) - 1) if row[:1] == b"+" else at.fault(*json.loads(row[1:]))

    def close(self) -> None:
        if self._process is None:
            return
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self._process.kill()
        self._process.wait()
        self._process = None

    def _decoded(self, file: RawFile | io.BytesIO, size: int, columns: tuple[str, ...]) -> Iterator[bytes]:
        order: bytes | None = None
        try:
            order, *parts = self._exchange([b"open", str(size).encode(), *(name.encode() for name in columns)])
            while order not in (b"end", b"exit"):
                if order == b"read":
                    file.seek(int(parts[0]))
                    order, *parts = self._exchange([file.read(int(parts[1]))])
                else:
                    yield from parts
                    order, *parts = self._exchange()
            if parts:
                what, do = (part.decode() for part in parts)
                raise Damage(what, do)
        finally:
            if order != b"end":  # in the middle of a file, or the worker has ended
                self.close()

    def _exchange(self, message: list[bytes] | None = None) -> list[bytes]:
        """Sends a message, if one is given, and returns the next one of the worker."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        reply = None
        with contextlib.suppress(OSError):  # a pipe without a process at its end
            if message is not None:
                write_frame(process.stdin, message)  # type: ignore[arg-type]
            reply = read_frame(process.stdout)  # type: ignore[arg-type]
        if reply is None:
            if process.wait() == -signal.SIGPROF:
                what = f"Decoding a few rows of this Parquet file takes more than {SECONDS_PER_FRAME:g} seconds."
                raise Damage(what, WRITE_AGAIN)
            raise Damage("This Parquet file crashed its decoder, so it is probably damaged.", FETCH_AGAIN)
        return reply

    def _start(self) -> subprocess.Popen[bytes]:
        child = isolated_python(_PROGRAM, environment=bare_environment() | _ARROW)
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            child.command, env=child.environment, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
        reply = read_frame(self._process.stdout)  # type: ignore[arg-type]
        if reply == [b"missing"]:
            raise TrilloraError("Reading .parquet files needs the package pyarrow.", do="pip install pyarrow")
        if reply is None:
            what = "The process that decodes Parquet files did not start."
            raise TrilloraError(what, where="data", do="check that `python -c 'import pyarrow.parquet'` works")
        return self._process


def _whole_file(source: Stream, kind: FileKind, meter: Meter) -> tuple[RawFile | io.BytesIO, int]:
    """A file that can be read in any order, and its size."""
    if isinstance(source, RawFile) and not kind.compression:
        return source, source.content.size
    data = read_up_to(decompressed(source, kind.compression, meter), MAX_HELD_PARQUET + 1)
    if len(data) > MAX_HELD_PARQUET:
        what = f"This Parquet file inside an archive is larger than {MAX_HELD_PARQUET >> 20} MiB."
        raise Damage(what, "unpack it, and put the .parquet file itself in data.path")
    return io.BytesIO(data), len(data)
