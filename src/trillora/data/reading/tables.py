"""Rows of CSV and TSV files with a header line. Each record becomes the JSON text of one object."""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from trillora.data.reading.cursor import MAX_COLUMNS, MAX_ROW_BYTES, SAVE_AS_UTF8, Cursor, too_long
from trillora.data.reading.streams import BLOCK, Damage, Stream
from trillora.data.rows import RowsOfFile

_SEPARATORS = {";": "semicolons", "\t": "tabs"}


class _TooLong(NamedTuple):
    """A line above the limit, which was not kept."""

    size: int
    num_quotes: int


class _CsvLines:
    """Lines for the csv module, which joins the lines of one record; this counts them, and limits how much it joins."""

    def __init__(self, stream: Stream) -> None:
        self._lines = _lines(stream)
        self.size = 0  # bytes of the record so far
        self.first = 1  # line of the file on which the record begins
        self.too_long: list[tuple[int, int]] = []  # lines and sizes of skipped records, to be reported by the reader
        self.ended_inside = False

    def __iter__(self) -> Iterator[str]:
        for number, line in _numbered(self._lines):
            if not self.size:
                self.first = number
            size = line.size if isinstance(line, _TooLong) else len(line)
            if isinstance(line, bytes) and self.size + size <= MAX_ROW_BYTES:
                self.size += size
                yield line.decode("utf-8", "surrogateescape")
                continue
            # A record ends where the number of quotes is even; once a line inside a record is lost, its end is unknown.
            if isinstance(line, bytes) or self.size or line.num_quotes % 2:
                what = f"{too_long(self.size + size)} Probably a closing quote is missing."
                raise Damage(what, "add the missing closing quote, or shorten this row", self.first)
            self.too_long.append((number, size))
        self.ended_inside = self.size > 0


def _numbered(lines: Iterable[bytes | _TooLong]) -> Iterator[tuple[int, bytes | _TooLong]]:
    """Lines with their numbers. A block can end between \\r and \\n, which are one line end."""
    number, ended_with_return = 0, False
    for line in lines:
        number += not (ended_with_return and line == b"\n")
        ended_with_return = isinstance(line, bytes) and line.endswith(b"\r")
        yield number, line


def _lines(stream: Stream) -> Iterator[bytes | _TooLong]:
    """Lines, including their line ends."""
    held: list[bytes] = []  # parts of a line longer than the block
    size = num_lost_quotes = 0
    while block := stream.read(BLOCK):
        for line in block.splitlines(keepends=True):
            is_whole = line.endswith((b"\n", b"\r"))
            if is_whole and not size:
                yield line
                continue
            held.append(line)
            size += len(line)
            if size > MAX_ROW_BYTES:
                num_lost_quotes += sum(part.count(b'"') for part in held)
                held.clear()
            if is_whole:
                yield b"".join(held) if size <= MAX_ROW_BYTES else _TooLong(size, num_lost_quotes)
                held, size, num_lost_quotes = [], 0, 0
    if size:
        yield b"".join(held) if size <= MAX_ROW_BYTES else _TooLong(size, num_lost_quotes)


def _separator(header: str, usual: str) -> str:
    """What separates the columns of this header. Spreadsheets of many countries write semicolons to .csv files."""
    others = [mark for mark in ";\t" if mark in header]
    is_one_column = len(next(csv.reader([header], delimiter=usual), [])) == 1
    return max(others, key=header.count) if is_one_column and others else usual


def csv_rows(stream: Stream, at: Cursor, usual: str, say: Callable[[str], None]) -> RowsOfFile:
    """Each record after the header as an object of strings. `say` receives a note if `usual` does not separate them."""
    csv.field_size_limit(MAX_ROW_BYTES)  # process-wide; the default of 128 KiB is less than a long answer
    lines = _CsvLines(stream)
    text = iter(lines)
    first = list(itertools.islice(text, 1))
    if (separator := _separator(first[0], usual) if first else usual) != usual:
        say(f"columns are separated by {_SEPARATORS[separator]}")
    records = csv.reader(itertools.chain(first, text), delimiter=separator)
    header: list[str] | None = None
    while True:
        try:
            record = next(records, None)
            lines.size = 0
        except csv.Error as error:
            what = f"This is not valid CSV: {error}."
            raise Damage(what, "correct this line, or export the table again", lines.first) from None
        for at.line, size in lines.too_long:
            yield at.row(b"", size)
        lines.too_long.clear()
        at.line = lines.first
        if record is None:
            return
        if lines.ended_inside:
            what = "The file ends inside a quoted field: a closing quote is missing, or the file was cut."
            raise Damage(what, "add the missing closing quote, or copy the file again")
        if not record:
            continue
        if header is None:
            header = _checked_header(record)
        elif len(record) < len(header) or any(record[len(header) :]):  # some writers end every record with a separator
            what = f"This record has {len(record)} fields; the header has {len(header)}."
            yield at.fault(what, "quote fields that contain the separator, and write every field of the record")
        else:
            yield at.record(dict(zip(header, record, strict=False)))


def _checked_header(names: list[str]) -> list[str]:
    (name, count) = Counter(names).most_common(1)[0]
    if count > 1 or len(names) > MAX_COLUMNS:
        has = f"two columns called {name!r}" if count > 1 else f"{len(names):,} columns; the limit is {MAX_COLUMNS}"
        raise Damage(f"The header has {has}.", "keep only the columns you need, each with its own name")
    if any(not name.isprintable() for name in names):
        raise Damage("The header is not UTF-8 text.", SAVE_AS_UTF8)
    return names
