"""Two streams of text next to each other in a terminal, printed row by row without moving the cursor.

    base                  │ adapter
    LoRA is a radio       │ LoRA is low-rank
    technology.           │ adaptation.

A row is printed when the line is complete in every column, so all columns grow together.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from trillora.safe_text import visible

NARROWEST = 32  # cells of a column; below that, answers are easier to read one under the other
_BETWEEN = " │ "
_TAB = "    "
_NO_CELL = ("Mn", "Me", "Cf")  # accents that combine with a letter, joiners


def column_width(width: int | None, number: int) -> int | None:
    """The cells of each of `number` columns, or None if the terminal is too narrow or there is none."""
    # The last cell stays empty: some terminals start a new line when it is used.
    each = ((width or 0) - 1 - len(_BETWEEN) * (number - 1)) // number
    return each if each >= NARROWEST else None


def side_by_side(streams: Mapping[str, Iterator[str]], width: int, say: Callable[[str], None]) -> None:
    """Prints each stream in a column of `width` cells under its name. An interrupt prints the text so far."""
    columns = {name: Column(width) for name in streams}
    running = dict(streams)
    _say_row(list(streams), width, say)
    try:
        while running:
            for name, stream in list(running.items()):
                piece = next(stream, None)
                if piece is None:
                    columns[name].finish()
                    del running[name]
                else:
                    columns[name].add(piece)
            _say_complete(list(columns.values()), width, say)
    finally:
        for column in columns.values():
            column.finish()
        _say_complete(list(columns.values()), width, say)


class Column:
    """Breaks a growing text into lines. A line that is complete never changes."""

    def __init__(self, width: int) -> None:
        self.lines: list[str] = []  # complete, not yet printed
        self.is_finished = False
        self._width, self._rest = width, ""

    def add(self, text: str) -> None:
        self._rest += visible(text).replace("\t", _TAB)
        while (end := self._end_of_line()) is not None:
            self.lines.append(self._rest[: end[0]])
            self._rest = self._rest[end[1] :]

    def finish(self) -> None:
        if self._rest and not self.is_finished:
            self.lines.append(self._rest)
        self.is_finished = True

    def _end_of_line(self) -> tuple[int, int] | None:
        """Where the first line ends and the next one begins, or None if the line may still grow."""
        line, newline, _ = self._rest.partition("\n")
        fitting = sum(used <= self._width for used in accumulate(map(_cells, line)))
        if fitting == len(line):
            return (fitting, fitting + 1) if newline else None
        space = line.rfind(" ", 0, fitting + 1)
        return (space, space + 1) if line[:space].strip() and space > 0 else (fitting, fitting)


def _say_complete(columns: list[Column], width: int, say: Callable[[str], None]) -> None:
    while any(column.lines for column in columns) and all(column.lines or column.is_finished for column in columns):
        _say_row([column.lines.pop(0) if column.lines else "" for column in columns], width, say)


def _say_row(cells: list[str], width: int, say: Callable[[str], None]) -> None:
    padded = (text + " " * (width - sum(map(_cells, text))) for text in cells)
    say(_BETWEEN.join(padded).rstrip() + "\n")


def _cells(letter: str) -> int:
    """The width of a character in a terminal."""
    if unicodedata.category(letter) in _NO_CELL:
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1
