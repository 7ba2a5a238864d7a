"""Documents into rows of a fixed number of slots, and the arrays of such a row.

B rows of a batch, T slots of a row. Packing decides only which documents share a row; segments and positions keep
them apart, so that a packed row trains exactly what its documents train alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trillora.data.encode import Rendered
from trillora.errors import TrilloraError


def best_fit(lengths: Sequence[int], sequence_length: int) -> list[list[int]]:
    """Documents, by index, for each row: longest first, each into the fullest row that still has room for it."""
    rows: list[list[int]] = []
    rows_with_room: dict[int, list[int]] = {}  # room left -> rows, used as stacks
    rooms: list[int] = []  # the keys of it that have a row, sorted
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = bisect.bisect_left(rooms, lengths[index])
        if place == len(rooms):
            row, room = len(rows), sequence_length
            rows.append([])
        else:
            room = rooms[place]
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms.pop(place)
        rows[row].append(index)
        left = room - lengths[index]
        assert left >= 0, "longer documents are refused or split before packing"
        waiting = rows_with_room.setdefault(left, [])
        if not waiting:
            bisect.insort(rooms, left)
        waiting.append(row)
    return rows


def one_per_row(lengths: Sequence[int]) -> list[list[int]]:
    """Each document in a row of its own."""
    return [[index] for index in range(len(lengths))]


def refuse_too_long(documents: Sequence[Rendered], sequence_length: int) -> None:
    """Cutting a conversation could cut its answer away, so none is cut."""
    too_long = [document for document in documents if len(document) > sequence_length]
    if not too_long:
        return
    longest = max(too_long, key=len)
    raise TrilloraError(
        f"{len(too_long)} of {len(documents)} rows are longer than sequence_length {sequence_length}; "
        f"the longest has {len(longest)} tokens.",
        where=longest.where or None,
        do=f"set train.sequence_length to at least {len(longest)}, or shorten or remove the rows",
    )


def split_long(documents: Sequence[Rendered], sequence_length: int) -> list[Rendered]:
    """Long documents in pieces of at most `sequence_length` tokens.

    A piece begins with the last token of the piece before, so that no target is lost at a seam and none counts twice.
    """
    pieces = []
    for document in documents:
        for start in range(0, max(len(document) - 1, 1), sequence_length - 1):
            part = slice(start, start + sequence_length)
            pieces.append(Rendered(document.tokens[part], document.supervised[part], document.where))
    return pieces


def fill_row(documents: Sequence[Rendered], row: dict[str, NDArray[np.generic]]) -> None:
    """Write documents side by side into a row's arrays (each [T], prepared as padding).

    A slot's target is the next token of its own document, so the last token of a document has none.
    """
    start = 0
    for segment, document in enumerate(documents, start=1):
        end = start + len(document)
        row["tokens"][start:end] = document.tokens
        row["segments"][start:end] = segment
        row["positions"][start:end] = np.arange(len(document))
        supervised = document.supervised[1:]
        row["targets"][start : end - 1] = np.where(supervised, document.tokens[1:], 0)
        row["weights"][start : end - 1] = supervised
        start = end
