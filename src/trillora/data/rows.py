"""The types shared by reading, rendering and tokenizing: raw rows, what a row means, and what is wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trillora.errors import TrilloraError

Message = dict[str, Any]


class RawRow(NamedTuple):
    """One row as JSON text, not yet parsed."""

    member: str  # path inside an archive, "" for a plain file
    line: int  # on which it begins, from 1; in files without lines (Parquet), the number of the record
    raw: bytes  # UTF-8 if the file is correct
    nth: int = 1  # of the rows that begin on this line


class Fault(NamedTuple):
    """A row, or a part of a file, that could not be read."""

    member: str
    line: int
    what: str
    do: str
    nth: int = 1


RowsOfFile = Iterator[RawRow | Fault]


class BadRow(Exception):
    """A row that cannot be trained on. The caller, which knows its place, counts it or raises `refused`."""

    def __init__(self, what: str, do: str, past_limit: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.do = do
        self.past_limit = past_limit  # it used up the time or memory limit of a row


class BadTemplate(BadRow):
    """A template that does not compile, so that no row can be rendered. `where`: its option."""

    def __init__(self, what: str, where: str, do: str) -> None:
        super().__init__(what, do)
        self.where = where


@dataclass(frozen=True)
class Chat:
    """A validated conversation."""

    messages: list[Message]
    tools: list[Any] | None = None
    num_prompt: int = 0  # leading turns that belong to the prompt, where the row separates prompt and completion
    untrained: frozenset[int] = frozenset()  # assistant turns with weight 0, which are read but are no targets
    arguments: dict[str, Any] = field(default_factory=dict)  # for the chat template, in addition to the recipe's


@dataclass(frozen=True)
class Pair:
    """Raw text in two parts. Only the second is trained; no chat template is used."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """One text, trained from start to end."""

    text: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, of which the first is the better one. Each side has the prompt."""

    chosen: Chat | Pair
    rejected: Chat | Pair


@dataclass(frozen=True)
class Labelled:
    """An answer that is good or bad."""

    answer: Chat | Pair
    is_good: bool


Example = Chat | Pair | Text | Preference | Labelled


def place(file: str, member: str = "", line: int = 0, nth: int = 1) -> str:
    """The location of a row in messages: `file:line`, or `archive!member:line`. JSON can have several rows on a line.

    >>> place("a.zip", "b.json", 1, 2)
    'a.zip!b.json:1 (row 2 of the line)'
    """
    name = f"{file}!{member}" if member else file
    row = f" (row {nth:,} of the line)" if nth > 1 else ""
    return f"{name}:{line}{row}" if line else name


def refused(what: str, where: str, do: str) -> TrilloraError:
    """The error for a bad row, or an unreadable part of a file, under `data.on_bad_row: refuse`. `where`: see `place`.

    >>> refused("This row is not JSON.", "data.zip!chats/b.jsonl:3", "correct it").do
    'correct it; or set data.on_bad_row: skip to train without b.jsonl:3'
    """
    bad = re.split(r"[/!]", where)[-1]
    return TrilloraError(what, where=where, do=f"{do}; or set data.on_bad_row: skip to train without {bad}")
