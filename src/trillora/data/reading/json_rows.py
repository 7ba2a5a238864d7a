"""Rows of a JSON document of any size, in the memory of one row: only the ends of values are located, not parsed.

These documents all have the rows {"a": 1} and {"a": 2}:

    [{"a": 1}, {"a": 2}]
    {"version": 3, "data": [{"a": 1}, {"a": 2}]}
    {"a": 1} {"a": 2}                                        (documents one after the other, as in JSON Lines)
    {"x": {"high": [{"a": 1}], "low": [{"a": 2}]}}           (with the path `x.*`)
    {"compressed": true, "data": "1f8b..."}                  (hex of gzip of any of the above)

Any other object is one row. Whether a row is valid JSON is checked when it is parsed.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator

from trillora.data.reading.cursor import MAX_ROW_BYTES, Cursor
from trillora.data.reading.streams import BLOCK, Damage, Decompressed, Meter, Stream, Utf8
from trillora.data.rows import Fault, RawRow, RowsOfFile

MAX_PACKED_BYTES = 256 << 20  # a compressed document inside JSON is read into memory as a whole
_MAX_KEY_BYTES = 1 << 16
_MAX_SCALAR_BYTES = 1 << 20

_DECODER = json.JSONDecoder()
_COMMA = re.compile(r"[ \t\r\n]*+,[ \t\r\n]*+")
_NOTHING = re.compile(r"[ \t\r\n]*+")
_NOT_IN_ROWS = frozenset(("data", "compressed"))  # an object with these keys may be a document
_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb'[^\s,:\[\]{}"]*+')
_IN_STRING = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)
# Skips to the next bracket that matters: strings and the two innermost levels are matched as a whole.
_PLAIN = rb'[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_INNER = rb"[\[{](?:" + _PLAIN + rb")*+[\]}]"
_RUN = re.compile(rb"(?:" + _PLAIN + rb"|[\[{](?:" + _PLAIN + rb"|" + _INNER + rb")*+[\]}])*+", re.DOTALL)


def json_rows(stream: Stream, at: Cursor, rows: str | None, meter: Meter) -> RowsOfFile:
    """The rows of a document. `rows` is the path to them: keys and `*`, separated by dots."""
    path = tuple(rows.split(".")) if rows else None
    scan = Scanner(stream)
    try:
        yield from _documents(scan, at, path, meter, wrapped=False)
    except Damage as damage:
        damage.line = damage.line or scan.line
        raise
    if path and not at.num_records and scan.position:
        keys = f" Its keys: {' '.join(at.keys)}." if at.keys else ""
        what = f"This document has nothing at data.row_path: {rows}.{keys}"
        yield Fault(at.member, 0, what, "write keys of the document, separated by dots; * matches any key or element")


class Scanner:
    """Steps through JSON text value by value. Positions count bytes from the start of the text."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = b""
        self._base = 0  # position of the buffer
        self._at = 0  # inside the buffer
        self._parsed_to = 0  # up to this position, `_whole_values` was tried
        self._pin: int | None = None  # text from this position on is kept, since it may be one row
        self._line = 1
        self._line_at = 0  # position up to which lines were counted
        self._value_line = 1  # where the last value began

    def peek(self, keep: int | None = None) -> bytes:
        """The next byte that is not whitespace; b"" at the end."""
        while True:
            self._at = _SPACE.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer):
                return self._buffer[self._at : self._at + 1]
            if not self._more(keep):
                return b""

    def take(self, *expected: bytes) -> bytes:
        """Consume the next byte that is not whitespace, which must be one of these."""
        found = self.peek()
        if found not in expected:
            raise self.broken(f"expected {' or '.join(byte.decode() for byte in expected)}")
        self._at += 1
        return found

    def value(self, limit: int) -> tuple[bytes, int]:
        """The bytes of the next value, and their number; b"" if there are more than `limit`."""
        first = self.peek()
        start, self._value_line = self._base + self._at, self.line
        if first in (b"{", b"["):
            self._pass_nested(start, limit)
        elif first == b'"':
            self._pass_string(start, limit)
        else:
            self._pass_scalar(start)
        size = self._base + self._at - start
        return (self._buffer[start - self._base : self._at] if size <= limit else b""), size

    def skip(self) -> None:
        self.value(0)

    def object_keys(self) -> Iterator[str]:
        """The keys of an object. The caller must consume each value before the next key."""
        for _ in self.elements(b"{", b"}"):
            if self.peek() != b'"':
                raise self.broken("expected a key in quotes")
            raw, _ = self.value(_MAX_KEY_BYTES)
            try:
                key = str(json.loads(raw.decode("utf-8"), strict=False))
            except ValueError:
                raise self.broken("this key is too long or invalid") from None
            self.take(b":")
            yield key

    def whole_elements(self) -> Iterator[tuple[bytes, int]]:
        """The next elements of an array that are in the buffer together with the comma after them, and their lines."""
        self.peek()
        return self._whole_values(_COMMA)

    def whole_objects(self) -> Iterator[tuple[bytes, int]]:
        """The next objects that are in the buffer and are rows, as in JSON Lines, and their lines."""
        return self._whole_values(_NOTHING, not_with=_NOT_IN_ROWS)

    def _whole_values(
        self, between: re.Pattern[str], not_with: frozenset[str] = frozenset()
    ) -> Iterator[tuple[bytes, int]]:
        """The json module finds the ends of values several times faster than `value`, which handles what is left over.

        At most two blocks are parsed, because parsed values may take fifty times the memory of their text. No text is
        parsed twice: the time would grow with its square if many values were left over.
        """
        if self.position < self._parsed_to:
            return
        data = self._buffer[self._at : self._at + 2 * BLOCK]
        self._parsed_to = self.position + len(data)
        text = data.decode("utf-8", "surrogateescape")
        start = 0
        try:
            while start < len(text):
                value, end = _DECODER.raw_decode(text, start)
                separator = between.match(text, end)
                if separator is None or (not_with and (type(value) is not dict or not not_with.isdisjoint(value))):
                    return
                raw, line = text[start:end].encode("utf-8", "surrogateescape"), self.line
                self._at += len(raw) + separator.end() - end
                start = separator.end()
                yield raw, line
        except (ValueError, RecursionError):
            return

    def elements(self, opening: bytes = b"[", closing: bytes = b"]") -> Iterator[None]:
        """Yields at each element between the brackets. The caller must consume it before the next."""
        self.take(opening)
        if self.peek() == closing:
            self._at += 1
            return
        yield
        while self.take(b",", closing) != closing:
            yield

    def at_rows(self) -> bool:
        """Whether the next value is an array whose first element, if any, is an object."""
        if self.peek() != b"[":
            return False
        start = self._base + self._at
        self._at += 1
        inside = self.peek(keep=start)
        self._at = start - self._base
        return inside in (b"{", b"]")

    def pin(self) -> None:
        self._pin = self._base + self._at

    def unpin(self) -> bytes:
        """The text since `pin`, or b"" if it is longer than a row may be."""
        pin, self._pin = self._pin, None
        if pin is None or self._base + self._at - pin > MAX_ROW_BYTES:
            return b""
        return self._buffer[pin - self._base : self._at]

    @property
    def position(self) -> int:
        return self._base + self._at

    @property
    def line(self) -> int:
        """Of the next byte."""
        self._count_lines(self.position)
        return self._line

    def _count_lines(self, to: int) -> None:
        if to > self._line_at:
            self._line += self._buffer.count(b"\n", self._line_at - self._base, to - self._base)
            self._line_at = to

    def broken(self, why: str) -> Damage:
        what = f"This is not valid JSON at byte {self.position + 1}: {why}."
        return Damage(what, "correct the file at this byte", self.line)

    def _pass_nested(self, start: int, limit: int) -> None:
        depth = 1
        self._at += 1
        while depth:
            self._at = _RUN.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at == len(self._buffer):
                self._must_have_more(start, limit)
                continue
            byte = self._buffer[self._at]
            if byte == 0x22:
                self._pass_string(start, limit)
            else:
                depth += 1 if byte in b"[{" else -1
                self._at += 1

    def _pass_string(self, start: int, limit: int) -> None:
        self._at += 1
        while True:
            self._at = _IN_STRING.match(self._buffer, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._buffer) and self._buffer[self._at] == 0x22:
                self._at += 1
                return
            self._must_have_more(start, limit)  # end of the buffer, perhaps after a backslash

    def _pass_scalar(self, start: int) -> None:
        while True:
            end = _SCALAR.match(self._buffer, start - self._base).end()  # type: ignore[union-attr]
            self._at = end
            if end < len(self._buffer) or not self._more(start):
                break
            if self.position - start > _MAX_SCALAR_BYTES:
                raise self.broken("this is not a number")
        if self.position == start:
            raise self.broken("expected a value")

    def _must_have_more(self, start: int, limit: int) -> None:
        if not self._more(start if self.position - start <= limit else None):
            why = "a closing bracket or quote is missing, or the file was cut"
            do = "add the missing closing bracket or quote, or copy the file again"
            what = f"The file ends inside the value that starts at byte {start + 1}: {why}."
            raise Damage(what, do, self._value_line)

    def _more(self, keep: int | None) -> bool:
        """Read the next block, and keep the text from position `keep` on (default: from here)."""
        here = self.position
        keep = here if keep is None else keep
        if self._pin is not None:
            if here - self._pin > MAX_ROW_BYTES:
                self._pin = None
            else:
                keep = min(keep, self._pin)
        self._count_lines(keep)  # what is before is dropped
        kept = self._buffer[keep - self._base :]
        block = self._stream.read(max(BLOCK, len(kept) // 2))  # growing, so that a long row is copied only a few times
        self._buffer, self._base, self._at = kept + block, keep, here - keep
        return bool(block)


def _documents(scan: Scanner, at: Cursor, path: tuple[str, ...] | None, meter: Meter, *, wrapped: bool) -> RowsOfFile:
    """All documents of the text: .json files often contain JSON Lines."""
    while first := scan.peek():
        position = scan.position
        for raw, at.line in scan.whole_objects() if first == b"{" and path is None else ():
            yield at.row(raw, len(raw))
        if scan.position > position:
            continue
        if first == b"{":
            yield from _object(scan, at, path, meter, wrapped=wrapped)
        elif first == b"[":
            yield from _walk(scan, at, path or ())
        else:
            raise scan.broken("expected [ or {")


def _object(scan: Scanner, at: Cursor, path: tuple[str, ...] | None, meter: Meter, *, wrapped: bool) -> RowsOfFile:
    """A top-level object: a row, {"data": [rows]}, a compressed document, or the start of `path`."""
    compressed = has_rows = is_twice = False
    packed: tuple[bytes, int] | None = None
    start, line = scan.position, scan.line
    scan.pin()
    at.keys = []
    for key in scan.object_keys():
        if len(at.keys) < 12:
            at.keys.append(key[:80])
        first = scan.peek()
        if key == "compressed" and first == b"t" and not wrapped:
            compressed = scan.value(_MAX_KEY_BYTES)[0] == b"true"
        elif key == "data" and first == b'"' and not wrapped:
            is_twice = packed is not None
            packed = scan.value(MAX_PACKED_BYTES)
        elif path is None and key == "data" and scan.at_rows():
            has_rows = True
            scan.unpin()
            yield from _walk(scan, at, ())
        elif path and path[0] in ("*", key):
            yield from _walk(scan, at, path[1:])
        else:
            scan.skip()
    row = scan.unpin()
    if compressed and is_twice:
        raise scan.broken("the compressed document before it has the key 'data' twice")
    if compressed and packed:
        yield from _documents(_unwrapped(*packed, meter), at, path, meter, wrapped=True)
    elif path is None and not has_rows:
        at.line = line
        yield at.row(row, scan.position - start)


def _walk(scan: Scanner, at: Cursor, path: tuple[str, ...]) -> RowsOfFile:
    """The rows at `path` inside the next value. A list at the end of the path is a list of rows."""
    first = scan.peek()
    if not path and first == b"[":
        for _ in scan.elements():
            for raw, at.line in scan.whole_elements():
                yield at.row(raw, len(raw))
            yield _value_row(scan, at)
    elif not path:
        yield _value_row(scan, at)
    elif first == b"{":
        for key in scan.object_keys():
            if path[0] in ("*", key):
                yield from _walk(scan, at, path[1:])
            else:
                scan.skip()
    elif first == b"[" and path[0] == "*":
        for _ in scan.elements():
            yield from _walk(scan, at, path[1:])
    else:
        scan.skip()


def _value_row(scan: Scanner, at: Cursor) -> RawRow | Fault:
    scan.peek()
    at.line = scan.line
    return at.row(*scan.value(MAX_ROW_BYTES))


def _unwrapped(packed: bytes, size: int, meter: Meter) -> Scanner:
    """The document inside {"compressed": true, "data": "…"}."""
    if not packed:
        what = f"The compressed document has {size:,} bytes; the limit is {MAX_PACKED_BYTES >> 20} MiB."
        raise Damage(what, "decompress it into a .json file, or split it")
    try:
        inner = bytes.fromhex(packed[1:-1].decode("ascii"))
    except ValueError:
        what = 'The "data" of the compressed document is not hexadecimal.'
        raise Damage(what, 'write the hexadecimal form of the gzipped JSON to "data"') from None
    return Scanner(Utf8(Decompressed(io.BytesIO(inner), "gzip", meter)))
