"""Rows of one data file as a stream. Whatever the format, each row is returned as JSON text.

`a.csv` with the lines `text`, `one`, `two,three`, `four` gives

    RawRow("", 2, b'{"text": "one"}')
    Fault("", 3, "This record has 2 fields; the header has 1.", "quote fields that ...")
    RawRow("", 4, b'{"text": "four"}')

What cannot be read is a `Fault` between the rows; reading continues after it where possible. Memory is bounded by the
longest allowed row, not by the file. Rows are parsed later, in worker processes with limits.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from trillora.data.reading.archives import tar_members, zip_members
from trillora.data.reading.cursor import MAX_ROW_BYTES, SAVE_AS_UTF8, SHORTEN, Cursor, too_long
from trillora.data.reading.files import Content, DataFile, FileKind, cannot_read, read_block
from trillora.data.reading.json_rows import json_rows
from trillora.data.reading.parquet import ParquetDecoder
from trillora.data.reading.streams import BLOCK, Damage, Meter, RawFile, Stream, Utf8, decompressed
from trillora.data.reading.tables import csv_rows
from trillora.data.rows import Fault, RawRow, RowsOfFile

MAX_TEXT_BYTES = 8 << 20  # a longer text file is split at line ends into rows of about this size


class RowChoice(NamedTuple):
    """Which rows and values of a file are read."""

    row_path: str | None = None  # to the rows in a .json document
    columns: tuple[str, ...] = ()  # of a Parquet file; empty: all


EVERYTHING = RowChoice()


@dataclass(frozen=True)
class _Reading:
    """What the rows of one file are read with."""

    wanted: RowChoice
    meter: Meter
    parquet: ParquetDecoder
    say: Callable[[str], None]


def read_rows(
    file: DataFile,
    content: Content,
    parquet: ParquetDecoder,
    wanted: RowChoice = EVERYTHING,
    *,
    consumed: Callable[[int], None],
    say: Callable[[str], None] = lambda text: None,
) -> RowsOfFile:
    """All rows of a file in order, read from exactly the bytes of `content`. `consumed` is called with byte counts,
    `say` with what a user should know about the file.

    A failing disk or network, or a file that changes, raises a TrilloraError: continuing would train each run on a
    different data set.
    """
    meter = Meter(content.size, consumed)
    try:
        stream = file.open()
    except Exception as error:  # remote stores have their own exception types
        raise cannot_read(file.name, error) from None
    with stream:
        raw, reading = RawFile(stream, file.name, content, meter), _Reading(wanted, meter, parquet, say)
        if file.kind.is_archive:
            yield from _archive_rows(raw, file.kind, reading)
        else:
            yield from _member_rows(raw, file.kind, Cursor(), reading)
    meter.finish()


def first_rows(file: DataFile, num_rows: int, row_path: str | None = None) -> list[RawRow | Fault]:
    """The first rows of a local file, read from its first block alone. None of an archive or of a Parquet file, which
    cannot be read in part."""
    if file.kind.is_archive or file.kind.format == "parquet":
        return []
    with file.open() as stream:
        block = read_block(stream, BLOCK)
    meter = Meter(len(block), lambda count: None)
    reading = _Reading(RowChoice(row_path), meter, ParquetDecoder(), say=lambda text: None)
    found = list(itertools.islice(_member_rows(io.BytesIO(block), file.kind, Cursor(), reading), num_rows + 1))
    is_cut = len(block) == BLOCK and len(found) <= num_rows  # the last one ends with the block, not with the row
    return found[: len(found) - is_cut][:num_rows]


def _archive_rows(raw: RawFile, kind: FileKind, reading: _Reading) -> RowsOfFile:
    try:
        if kind.format == "zip":
            members = zip_members(raw, reading.meter, reading.say)
        else:
            members = tar_members(decompressed(raw, kind.compression, reading.meter), reading.say)
        for member in members:
            if isinstance(member, Fault):
                yield member
            else:
                yield from _member_rows(member.stream, member.kind, Cursor(member.name), reading)
    except Damage as damage:
        yield Fault("", 0, damage.what, damage.do)


def _member_rows(source: Stream, kind: FileKind, at: Cursor, reading: _Reading) -> RowsOfFile:
    """The rows of one file or archive member; if the rest cannot be read, a fault is the last item."""
    if reading.wanted.row_path and kind.format != "json":
        what = f"data.row_path is a path inside a .json document; this file is {kind.format}."
        yield Fault(at.member, 0, what, "remove data.row_path, or put only .json files in data.path")
        return
    rest = ""
    try:
        found = _format_rows(source, kind, at, reading)
        empty = Fault(at.member, 0, "This file is empty: it has no row.", "remove the file, or add rows to it")
        first = next(found, empty)
        rest = " The rest of the file is not read."
        yield first
        yield from found
    except Damage as damage:
        yield Fault(at.member, damage.line or at.line, damage.what + rest, damage.do)


def _format_rows(source: Stream, kind: FileKind, at: Cursor, reading: _Reading) -> RowsOfFile:
    if kind.format == "parquet":
        return reading.parquet.rows(source, kind, at, reading.meter, reading.wanted.columns)
    text = Utf8(decompressed(source, kind.compression, reading.meter))
    if kind.format == "json":
        return json_rows(text, at, reading.wanted.row_path, reading.meter)
    if kind.format == "text":
        return _text_rows(text, at)
    if kind.format == "jsonl":
        return _jsonl_rows(text, at)
    return csv_rows(text, at, "\t" if kind.format == "tsv" else ",", reading.say)


def _jsonl_rows(stream: Stream, at: Cursor) -> RowsOfFile:
    """Lines that are not blank. A whole block is split at once: this loop limits the speed of all data preparation."""
    member = at.member
    line = 1
    held: list[bytes] = []  # parts of a line longer than the block
    num_held = 0
    while True:
        at.line = line
        block = stream.read(BLOCK)
        lines = block.split(b"\n")
        tail = lines.pop()
        if lines or not block:
            ending = lines[0] if lines else b""
            if num_held + len(ending) > MAX_ROW_BYTES:
                yield Fault(member, line, too_long(num_held + len(ending)), SHORTEN)
            elif raw := b"".join([*held, ending]).strip():
                yield RawRow(member, line, raw)
            if not block:
                return
            for part in lines[1:]:
                line += 1
                if raw := part.strip():
                    yield RawRow(member, line, raw)
            line += 1
            held, num_held = [], 0
        held.append(tail)
        num_held += len(tail)
        if num_held > MAX_ROW_BYTES:
            held.clear()


def _text_rows(stream: Stream, at: Cursor) -> RowsOfFile:
    """The file as one row, or as several if it is long. A blank part is none. Line ends become \\n."""
    text = bytearray()
    position = 0  # of `text` in the file
    num_lost = 0  # bytes of a line above the limit
    while block := stream.read(BLOCK):
        if num_lost:
            end = block.find(b"\n") + 1
            num_lost += end or len(block)
            if not end:
                continue
            yield at.row(b"", num_lost)  # which is one line
            position, num_lost = position + num_lost, 0
            block = block[end:]
        text += block
        if len(text) < MAX_TEXT_BYTES:
            continue
        if cut := text.rfind(b"\n") + 1:
            yield from _text_row(bytes(text[:cut]), position, at)
            position += cut
            del text[:cut]
        elif len(text) > MAX_ROW_BYTES:
            num_lost = len(text)
            text.clear()
    if num_lost:
        yield at.row(b"", num_lost)
    yield from _text_row(bytes(text), position, at)


def _text_row(document: bytes, position: int, at: Cursor) -> RowsOfFile:
    line = at.line
    if document.strip():
        try:
            text = document.decode("utf-8").replace("\r\n", "\n")
        except UnicodeDecodeError as error:
            yield at.fault(f"Byte {position + error.start + 1} of the text is not UTF-8.", SAVE_AS_UTF8)
        else:
            yield at.record({"text": text})
    at.line = line + document.count(b"\n")
