"""Documents into rows of a fixed number of slots, and the arrays of such a row.

B rows of a batch, T slots of a row, N documents. Packing decides only which documents share a row; segments and
positions keep them apart, so that a packed row trains exactly what its documents train alone.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trillora.data.tokenizing.encode import TokenizedDocument


@dataclass(frozen=True)
class Rows:
    """Which documents stand in which row: those of row r are `documents[first[r]:first[r + 1]]`."""

    documents: NDArray[np.int64]
    first: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        return self.documents[self.first[row] : self.first[row + 1]]


def best_fit(lengths_N: NDArray[np.int64], sequence_length: int) -> Rows:
    """Longest first, each document into the fullest row that still has room for it."""
    order = np.argsort(-lengths_N, kind="stable")
    row_of = np.empty(len(lengths_N), np.int64)  # in that order
    rows_with_room: dict[int, list[int]] = {}  # room left -> rows, used as stacks
    rooms: list[int] = []  # the keys of it that have a row, sorted
    num_rows = 0
    for number, length in enumerate(lengths_N[order].tolist()):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, left = num_rows, sequence_length - length
            num_rows += 1
            assert left >= 0, "longer documents are refused, dropped or split before packing"
        else:
            room = rooms[place]
            waiting = rows_with_room[room]
            row, left = waiting.pop(), room - length
            if not waiting:
                del rooms[place]
        row_of[number] = row
        waiting = rows_with_room.setdefault(left, [])
        if not waiting:
            bisect.insort(rooms, left)
        waiting.append(row)
    by_row = np.argsort(row_of, kind="stable")
    return Rows(order[by_row], np.searchsorted(row_of[by_row], np.arange(num_rows + 1)))


def one_per_row(chosen: NDArray[np.int64]) -> Rows:
    """Each document in a row of its own."""
    return Rows(chosen, np.arange(len(chosen) + 1))


def bucket_lengths(lengths_N: NDArray[np.int64], sequence_length: int, num_buckets: int) -> list[int]:
    """Row lengths for documents that are not packed: even steps up to `sequence_length`, without those nobody needs.

    In steps of 128 where the length allows, which is what TPU kernels take.
    """
    unit = next(unit for unit in (128, 8, 1) if sequence_length % unit == 0)
    steps = {-(-sequence_length * k // (num_buckets * unit)) * unit for k in range(1, num_buckets)} | {sequence_length}
    bounds = sorted(steps)
    needed = np.unique(np.searchsorted(bounds, lengths_N))
    return [bounds[index] for index in needed.tolist()]


def fill_row(documents: Iterable[TokenizedDocument], row: dict[str, NDArray[np.generic]]) -> None:
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
