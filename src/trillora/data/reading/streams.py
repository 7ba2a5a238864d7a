"""Bytes as a stream, whatever they are wrapped in, with a bound on everything a hostile file could make grow.

A `Stream` gives blocks until b"". The parts wrap each other: the file itself (counted by a `Meter`), decompression, and
text brought to UTF-8. What is wrong with the bytes is raised as `Damage`, after all bytes before it were given.
"""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

from trillora.data.reading.files import cannot_read
from trillora.errors import TrilloraError

BLOCK = 1 << 18  # bytes asked for at a time: small enough to stay in the processor's cache
MAX_RATIO = 200  # decompressed bytes per compressed one; text gives 3 to 20
FREE_BYTES = 64 << 20  # what every stream may give before the ratio counts
FREE_BYTES_OF_FILE = 8 * FREE_BYTES  # the same for all members of one archive together
_ZSTD_SLICE = 1 << 10  # a zstd block gives at most 128 KiB for 4 bytes, so that one slice gives at most 32 MiB
_ZSTD_WINDOW = 1 << 27  # bytes the decoder must remember; 128 MiB is also the limit of the zstd command
_BYTE_ORDER_MARKS = (  # UTF-32 first: its mark begins with that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, ""),
)


class Damage(Exception):
    """The bytes from here on cannot be used."""

    def __init__(self, what: str, do: str) -> None:
        super().__init__(what)
        self.what = what
        self.do = do


class Stream(Protocol):
    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, perhaps fewer; b"" only at the end."""


class Meter:
    """Counts the bytes of one file as they are used, and what decompression makes of them."""

    def __init__(self, size: int, consumed: Callable[[int], None]) -> None:
        self._size = size
        self._consumed = consumed
        self._taken = 0
        self._made = 0

    def take(self, count: int) -> None:
        """Bytes read from the file. Those read twice (an archive's directory) count once."""
        if self._size:
            count = min(count, self._size - self._taken)
        self._taken += count
        if count:
            self._consumed(count)

    def finish(self) -> None:
        self.take(max(0, self._size - self._taken))

    def made(self, count: int, *, of_stream: int, from_bytes: int) -> None:
        """`count` more bytes came out of a stream that has now given `of_stream` for `from_bytes` compressed ones."""
        self._made += count
        if of_stream > MAX_RATIO * from_bytes + FREE_BYTES:
            raise _bomb(of_stream, from_bytes, FREE_BYTES)
        if self._made > MAX_RATIO * self._taken + FREE_BYTES_OF_FILE:
            raise _bomb(self._made, self._taken, FREE_BYTES_OF_FILE)


class RawFile:
    """The file itself. A failing disk or network is no fault of the data: it ends the run."""

    def __init__(self, stream: BinaryIO, name: str, meter: Meter) -> None:
        self._stream = stream
        self._name = name
        self._meter = meter
        self.closed = False  # for pyarrow, which asks

    def read(self, size: int = -1, /) -> bytes:
        try:
            data = self._stream.read(size)
        except Exception as error:  # remote stores raise what they like
            raise cannot_read(self._name, error) from None
        self._meter.take(len(data))
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def seekable(self) -> bool:
        return self._stream.seekable()

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True  # whoever opened the file closes it


class Decompressed:
    """A gzip or zstd stream, also of several parts one after the other, as those tools accept it."""

    def __init__(self, source: Stream, compression: str, meter: Meter) -> None:
        self._source = source
        self._compression = compression
        self._meter = meter
        self._decoder: Any = None  # none between two parts
        self._input = b""
        self._output = b""
        self._given = 0  # of the output
        self._num_parts = self._num_in = self._num_out = 0

    def read(self, size: int, /) -> bytes:
        while self._given == len(self._output):
            if not self._input:
                self._input = self._source.read(BLOCK)
                self._num_in += len(self._input)
            if self._decoder is None and not self._begin_part():
                return b""
            if not self._input:
                raise Damage(
                    f"The {self._compression} data ends too early: the file was cut.",
                    "copy or download the file again, completely",
                )
            self._output, self._given = self._step(), 0
            self._num_out += len(self._output)
            self._meter.made(len(self._output), of_stream=self._num_out, from_bytes=self._num_in)
        start, self._given = self._given, min(self._given + size, len(self._output))
        return self._output[start : self._given]

    def _begin_part(self) -> bool:
        """Set up the decoder; False at the end of the stream."""
        if self._num_parts and self._compression == "gzip":
            while self._input and not (stripped := self._input.lstrip(b"\0")):  # tape drives fill up with zeros
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
        except Exception as error:  # zlib.error, or an error of zstandard, which may not be installed
            what = f"This is not {self._compression} data, or it is damaged: {error}."
            raise Damage(what, "copy or download the file again; check that its suffix is right") from None
        if decoder.eof:
            self._input = decoder.unused_data + self._input
            self._decoder = None
        return output


class _Utf8:
    """A stream whose first bytes were looked at, and which is brought to UTF-8 if it is in another encoding."""

    def __init__(self, head: bytes, source: Stream, encoding: str) -> None:
        self._head = head
        self._source = source
        # Half a surrogate pair becomes bytes that are not UTF-8, so that only its own row is refused.
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


def as_utf8(source: Stream) -> Stream:
    """The text without byte order mark, in UTF-8 if the mark says UTF-16 or UTF-32. Bytes are not checked otherwise."""
    head = read_up_to(source, 4)
    for mark, encoding in _BYTE_ORDER_MARKS:
        if head.startswith(mark):
            return _Utf8(head[len(mark) :], source, encoding)
    return _Utf8(head, source, "")


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
        raise TrilloraError("Reading .zst needs the package zstandard.", do="pip install zstandard") from None
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()


def _bomb(made: int, taken: int, free: int) -> Damage:
    return Damage(
        f"{taken:,} compressed bytes have become {made:,}: more than {MAX_RATIO} for one and {free >> 20} MiB are "
        "taken for a compression bomb.",
        "remove it; if you trust it, decompress it yourself and name the result",
    )
