"""Rows of a JSONL file, read as a stream, each knowing the file and line it came from.

Two formats so far: `messages` (a list of role/content turns under "messages") and `text` (a string under "text").
Everything wrong with a line is said here, with its place, before any later part has to guess.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trillora.errors import TrilloraError, nearest

FORMATS = ("messages", "text")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")  # json accepts half of a pair; UTF-8, and so a tokenizer, does not


@dataclass(frozen=True)
class Row:
    """One JSON object and where it stands."""

    file: str
    line: int  # counted from 1
    value: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"


def read_jsonl(path: str | Path) -> Iterator[Row]:
    """The rows of one file in order. Blank lines are no rows; a file without any row is an error."""
    file = str(path)
    num_rows = 0
    try:
        with open(path, "rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if number == 1:
                    raw = raw.removeprefix(_BYTE_ORDER_MARK)
                if raw.strip():
                    num_rows += 1
                    yield Row(file, number, _parse(raw, f"{file}:{number}"))
    except FileNotFoundError:
        raise TrilloraError(
            f"The data file {file} does not exist.",
            where=file,
            do="check the path; it is relative to where you started",
        ) from None
    except OSError as error:
        raise TrilloraError(
            f"The data file {file} cannot be read: {error.strerror}.", where=file, do="name a readable .jsonl file"
        ) from error
    if not num_rows:
        raise TrilloraError(f"The data file {file} is empty.", where=file, do="give it one JSON object per line")


def detect_format(rows: Iterable[Row]) -> str:
    """The one format all rows share: `messages` or `text`."""
    found: str | None = None
    for row in rows:
        fitting = [name for name in FORMATS if name in row.value]
        if len(fitting) > 1:
            raise TrilloraError(
                'A row has both "messages" and "text"; which one to train on is not a guess to make.',
                where=row.where,
                do="name the format in the recipe: data: {path: …, format: messages} or format: text",
            )
        if not fitting:
            _refuse_unknown(row)
        if found is not None and fitting[0] != found:
            raise TrilloraError(
                f'A row is in the "{fitting[0]}" format, the rows before it in "{found}".',
                where=row.where,
                do="put the two formats in two files",
            )
        found = fitting[0]
    assert found is not None, "read_jsonl refuses a file without rows"
    return found


def check_format(row: Row, name: str) -> None:
    """Refuse a row that is not of the format `name`."""
    if name not in FORMATS:
        guess = nearest(name, FORMATS)
        hint = f"did you mean {guess!r}? " if guess else ""
        raise TrilloraError(
            f"There is no data format {name!r}.", do=f"{hint}formats: auto {' '.join(FORMATS)}", where="data.format"
        )
    if name not in row.value:
        _refuse_unknown(row)


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    try:
        line = raw.rstrip(b"\r\n").decode("utf-8")
    except UnicodeDecodeError as error:
        raise TrilloraError(
            f"Byte {error.start + 1} of this line is not UTF-8.", where=where, do="save the file as UTF-8"
        ) from None
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(line):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise TrilloraError(
            "This line escapes half of a surrogate pair (\\ud800 to \\udfff), which is no character.",
            where=where,
            do="write the character itself in UTF-8, or both halves of the pair",
        ) from None
    except json.JSONDecodeError as error:
        raise TrilloraError(
            f"This line is not JSON: {error.msg} at column {error.colno}.",
            where=where,
            do="write one complete JSON object per line",
        ) from None
    except (ValueError, RecursionError) as error:
        raise TrilloraError(
            f"This line is not JSON one can use: {error}.", where=where, do="write one plain JSON object per line"
        ) from None
    if not isinstance(value, dict):
        raise TrilloraError(
            f"This line holds {_kind(value)}, not a JSON object.",
            where=where,
            do='write {"messages": [...]} or {"text": "..."} on each line',
        )
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _refuse_unknown(row: Row) -> NoReturn:
    keys = " ".join(sorted(row.value)[:10]) or "none"
    raise TrilloraError(
        f'This row has neither "messages" nor "text"; its keys: {keys}.',
        where=row.where,
        do='write {"messages": [{"role": "user", "content": "..."}, ...]} or {"text": "..."}',
    )


def _kind(value: object) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
