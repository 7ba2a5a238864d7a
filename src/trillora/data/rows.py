"""What travels between the parts of this layer: rows as they are read, what they mean, and what was wrong with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

Message = dict[str, Any]


class RawRow(NamedTuple):
    """One row as JSON text, not yet parsed."""

    member: str  # path inside an archive, "" outside of one
    line: int  # counted from 1; in files without lines, the number of the record
    raw: bytes  # UTF-8, if the file is right


class Fault(NamedTuple):
    """Something that could not be read while the rest could."""

    member: str
    line: int
    what: str
    do: str


class BadRow(Exception):
    """A row that cannot be trained on. Whoever knows its place makes a `TrilloraError` of it, or counts it."""

    def __init__(self, what: str, do: str, past_limit: bool = False) -> None:
        super().__init__(what)
        self.what = what
        self.do = do
        self.past_limit = past_limit  # it cost all the time or memory a row may cost


@dataclass(frozen=True)
class Chat:
    """A conversation, checked."""

    messages: list[Message]
    tools: list[Any] | None = None
    num_prompt: int = 0  # leading turns that only set the scene, where the row tells prompt and completion apart


@dataclass(frozen=True)
class Pair:
    """Raw text in two parts: the second is trained, no chat template is used."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """One document, trained whole."""

    text: str


Example = Chat | Pair | Text


def place(file: str, member: str = "", line: int = 0) -> str:
    """How people are told where something stands: `file:line`, or `archive!member:line`."""
    name = f"{file}!{member}" if member else file
    return f"{name}:{line}" if line else name
