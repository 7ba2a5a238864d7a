"""Byte streams with decompression and decoding; everything that a hostile file could make grow is bounded.

A `Stream` returns blocks until b"". Streams are nested: the file (`RawFile`, counted by a `Meter`), decompression,
conversion to UTF-8. Damaged bytes raise `Damage`, after all bytes before them were returned.
"""

from __future__ import annotations

import codecs
import io
import os
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from trillora.data.reading.cursor import FETCH_AGAIN
from trillora.data.reading.files import HASHED_BLOCK, Content, cannot_read, read_block
from trillora.errors import TrilloraError

BLOCK = 1 << 18  # bytes per read: small enough for the processor's cache
MAX_RATIO = 200  # decompressed bytes per compressed byte; text has 3 to 20
FREE_BYTES = 64 << 20  # every stream may produce this much before the ratio is checked
FREE_BYTES_OF_FILE = 8 * FREE_BYTES  # the same for all members of one archive together
_KEPT_BLOCKS = 8  # a Parquet reader alternates between columns
_MOST_EARLY = 16  # blocks of a file of the hub that wait for those before them
_ZSTD_SLICE = 1 << 10  # 4 bytes of zstd expand to at most 128 KiB, so one slice to at most 32 MiB
_ZSTD_WINDOW = 1 << 27  # bytes of history in the decoder; 128 MiB is also the limit of the zstd command
_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with UTF-16's
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, ""),
)


class Damage(Exception):
    """The bytes from here on are unusable. `line`: where, if it is not where the next record was expected."""

    def __init__(self, what: str, do: str, line: int | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.do = do
        self.line = line


class Stream(Protocol):
    def read(self, size: int, /) -> bytes:
        """At most `size` bytes; b"" only at the end."""


class Meter:
    """Counts the bytes read from one file, and the bytes that decompression produces."""

    def __init__(self, size: int, consumed: Callable[[int], None]) -> None:
        self._size = size
        self._consumed = consumed
        self._taken = 0
        self._produced = 0

    def take(self, count: int) -> None:
        """Count bytes read from the file. Bytes read twice (an archive's directory) count once."""
        if self._size:
            count = min(count, self._size - self._taken)
        self._taken += count
        if count:
            self._consumed(count)

    def finish(self) -> None:
        self.take(max(0, self._size - self._taken))

    def produce(self, count: int, *, of_stream: int, from_bytes: int) -> None:
        """Count decompressed bytes. Their stream has produced `of_stream` bytes from `from_bytes` compressed ones."""
        self._produced += count
        if of_stream > MAX_RATIO * from_bytes + FREE_BYTES:
            raise _bomb(of_stream, from_bytes, FREE_BYTES)
        if self._produced > MAX_RATIO * self._taken + FREE_BYTES_OF_FILE:
            raise _bomb(self._produced, self._taken, FREE_BYTES_OF_FILE)


class RawFile(io.RawIOBase):
    """The file itself, with exactly the bytes that were hashed: each block is compared with `content`.

    A failing disk or network, or a file that changes, is not a fault of the data: it stops the run.
    """

    def __init__(self, stream: BinaryIO, name: str, content: Content, meter: Meter) -> None:
        self._stream = stream
        self._stream_at = 0
        self._name = name
        self.content = content
        self._meter = meter
        self._position = 0
        self._blocks: dict[int, bytes] = {}  # the last few
        self._whole = None if content.states else _WholeFile(content)

    def read(self, size: int = -1, /) -> bytes:
        end = self.content.size if size < 0 else min(self.content.size, self._position + size)
        parts: list[bytes] = []
        while self._position < end:
            number, start = divmod(self._position, HASHED_BLOCK)
            parts.append(self._block(number)[start : start + end - self._position])
            self._position += len(parts[-1])
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self._meter.take(len(data))
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.content.size}[whence]
        if position < 0:
            raise ValueError("negative position")
        self._position = position
        return position

    def seekable(self) -> bool:
        return True

    def _block(self, number: int) -> bytes:
        if number in self._blocks:
            return self._blocks[number]
        start = number * HASHED_BLOCK
        try:
            if self._stream_at != start:  # a web server may not be able to seek, and need not for most files
                self._stream.seek(start)
            block = read_block(self._stream, min(HASHED_BLOCK, self.content.size - start))
        except Exception as error:  # remote stores have their own exception types
            raise cannot_read(self._name, error) from None
        self._stream_at = start + len(block)
        if self._whole is not None and not self._whole.add(number, block):
            do = "check the connection: a proxy or mirror may change files; then start again"
            raise TrilloraError("The data file is not the one that the hub lists.", where=self._name, do=do)
        if not self.content.has_block(number, block):
            do = "make sure that nothing writes to this file, then start again"
            raise TrilloraError("The data file changed while it was read.", where=self._name, do=do)
        if len(self._blocks) >= _KEPT_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        self._blocks[number] = block
        return block


class _WholeFile:
    """Compares a file of the hub with the hub's digest while it is read, since it is not read twice. A block that comes
    early, such as the end of a Parquet file, waits. A file of which parts are never read cannot be compared."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._state = content.digest_in_order()
        self._next = 0  # number of the first block that is not in the digest
        self._early: dict[int, bytes] = {}

    def add(self, number: int, block: bytes) -> bool:
        """False if the file is complete and differs."""
        if number < self._next:
            return True
        if number == self._next or len(self._early) < _MOST_EARLY:
            self._early[number] = block
        while (following := self._early.pop(self._next, None)) is not None:
            self._state.update(following)
            self._next += 1
        is_whole = self._next * HASHED_BLOCK >= self._content.size
        return not is_whole or self._state.hexdigest() == self._content.sha256


class Decompressed:
    """A gzip or zstd stream. Several concatenated parts are allowed, as in those tools."""

    def __init__(self, source: Stream, compression: str, meter: Meter) -> None:
        self._source = source
        self._compression = compression
        self._meter = meter
        self._decoder: Any = None  # None between two parts
        self._input = b""
        self._output = b""
        self._given = 0  # bytes of the output already returned
        self._num_parts = self._num_in = self._num_out = 0

    def read(self, size: int, /) -> bytes:
        while self._given == len(self._output):
            if not self._input:
                self._input = self._source.read(BLOCK)
                self._num_in += len(self._input)
            if self._decoder is None and not self._begin_part():
                return b""
            if not self._input:
                raise Damage(f"The {self._compression} data ends too early: the file was cut.", FETCH_AGAIN)
            self._output, self._given = self._step(), 0
            self._num_out += len(self._output)
            self._meter.produce(len(self._output), of_stream=self._num_out, from_bytes=self._num_in)
        start, self._given = self._given, min(self._given + size, len(self._output))
        return self._output[start : self._given]

    def _begin_part(self) -> bool:
        """Set up the decoder; False at the end of the stream."""
        if self._num_parts and self._compression == "gzip":
            while self._input and not (stripped := self._input.lstrip(b"\0")):  # padding of tape drives
                self._input = self._source.read(BLOCK)
                self._num_in += len(self._input)
            self._input = stripped if self._input else b""
        if not self._input and self._num_parts:
            return False
        self._num_parts += 1
        self._decoder = zlib.decompressobj(31) if self._compression == "gzip" else _zstd_decoder()
        return True

    def _step(self) -> bytes:
        output: bytes
        decoder = self._decoder
        try:
            if self._compression == "gzip":
                output = decoder.decompress(self._input, BLOCK)
                self._input = decoder.unconsumed_tail
            else:
                output = decoder.decompress(self._input[:_ZSTD_SLICE])
                self._input = self._input[_ZSTD_SLICE:]
        except MemoryError:
            raise
        except Exception as error:  # zlib.error, or one of zstandard, which may not be installed
            what = f"This is not {self._compression} data, or it is damaged: {error}."
            raise Damage(what, f"check that the suffix is right; {FETCH_AGAIN}") from None
        if decoder.eof:
            self._input = decoder.unused_data + self._input
            self._decoder = None
        return output


class Utf8:
    """The text without its byte order mark; UTF-16 and UTF-32 with a mark become UTF-8. Other bytes are not checked."""

    def __init__(self, source: Stream) -> None:
        head = read_up_to(source, 4)
        mark, encoding = next((pair for pair in _BYTE_ORDER_MARKS if head.startswith(pair[0])), (b"", ""))
        self._head = head.removeprefix(mark)
        self._source = source
        # Half of a surrogate pair becomes invalid UTF-8, so that only its own row is refused.
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogatepass") if encoding else None

    def read(self, size: int, /) -> bytes:
        while True:
            data, self._head = self._head or self._source.read(size), b""
            if self._decoder is None:
                return data
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise Damage(f"The text is not valid {error.encoding}.", "save the file as UTF-8") from None
            if text or not data:
                return text.encode("utf-8", "surrogatepass")


def decompressed(source: Stream, compression: str, meter: Meter) -> Stream:
    """The stream itself where `compression` is ""."""
    return Decompressed(source, compression, meter) if compression else source


def read_up_to(source: Stream, size: int) -> bytes:
    """Exactly `size` bytes, fewer only at the end."""
    parts: list[bytes] = []
    while size and (part := source.read(min(size, BLOCK))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _zstd_decoder() -> Any:
    try:
        import zstandard
    except ImportError:
        raise TrilloraError("Reading .zst files needs the package zstandard.", do="pip install zstandard") from None
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()


def _bomb(produced: int, taken: int, free: int) -> Damage:
    return Damage(
        f"This looks like a compression bomb: {taken:,} compressed bytes became {produced:,}. The limit is "
        f"{free >> 20} MiB plus {MAX_RATIO} times the compressed size.",
        "remove the file; if you trust it, put its rows into a plain .jsonl file and that in data.path",
    )
