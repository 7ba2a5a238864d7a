"""Documents into sequences of a fixed length, and the arrays of a sequence.

N documents, T tokens in a sequence. Packing decides only which documents share a sequence. Segments and positions keep
them separate, so that a packed sequence trains exactly what its documents train alone.

Example: documents [5 6 7] (6 and 7 trained) and [8 9] (9 trained) in one sequence of T = 6:

    tokens     5 6 7 8 9 0     0 is padding
    targets    6 7 0 9 0 0     the next token of the same document
    weights    1 1 0 1 0 0     1, or the row's weight, where the target is in the loss
    segments   1 1 1 2 2 0     attention stays within a segment; 0 is padding
    positions  0 1 2 0 1 0
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trillora.data.tokenizing.encode import TokenizedDocument


@dataclass(frozen=True)
class PackedRows:
    """Which documents are in which sequence: sequence r holds `documents[first[r]:first[r + 1]]`."""

    documents: NDArray[np.int64]
    first: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.first) - 1

    def __getitem__(self, row: int) -> NDArray[np.int64]:
        return self.documents[self.first[row] : self.first[row + 1]]

    def most_in(
        self,
        block: int,
        lengths_N: NDArray[np.int64],
        sequence_length: int,
        firsts_N: NDArray[np.int64] | None = None,
    ) -> int:
        """How many documents or runs of padding begin in the same block of `block` tokens of a sequence, at most.

        Documents of 3, 2 and 2 tokens in a sequence of 8 begin at 0, 3 and 5, and its padding at 7: 3 in a block of 4.
        Of a pair, the rejected side begins after `firsts_N` tokens.
        """
        ends = np.concatenate([[0], np.cumsum(lengths_N[self.documents])])
        row = np.repeat(np.arange(len(self)), np.diff(self.first))
        begins = ends[:-1] - ends[self.first[row]]
        padding = ends[self.first[1:]] - ends[self.first[:-1]]  # where it begins
        has_padding = np.flatnonzero(padding < sequence_length)
        firsts = np.zeros_like(begins) if firsts_N is None else firsts_N[self.documents]
        rows = np.concatenate([row, row[firsts > 0], has_padding])
        begins = np.concatenate([begins, (begins + firsts)[firsts > 0], padding[has_padding]])
        return int(np.bincount(rows * (sequence_length // block) + begins // block).max())


def best_fit(lengths_N: NDArray[np.int64], sequence_length: int) -> PackedRows:
    """Best-fit decreasing: longest document first, each into the fullest sequence that has room for it.

    Lengths [3, 5, 6] with sequence_length 8 -> sequences [[2], [1, 0]].
    """
    order = np.argsort(-lengths_N, kind="stable")
    row_of = np.empty(len(lengths_N), np.int64)  # sequence of each document, in that order
    rows_with_room: dict[int, list[int]] = {}  # free tokens -> sequences, used as stacks
    rooms: list[int] = []  # its keys with a non-empty list, sorted
    num_rows = 0
    for number, length in enumerate(lengths_N[order].tolist()):
        place = bisect.bisect_left(rooms, length)
        if place == len(rooms):
            row, left = num_rows, sequence_length - length
            num_rows += 1
            assert left >= 0, "`fit` refuses, drops or splits longer documents"
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
    return PackedRows(order[by_row], np.searchsorted(row_of[by_row], np.arange(num_rows + 1)))


def one_per_row(chosen: NDArray[np.int64]) -> PackedRows:
    """Each document in its own sequence."""
    return PackedRows(chosen, np.arange(len(chosen) + 1))


def bucket_lengths(lengths_N: NDArray[np.int64], sequence_length: int, num_buckets: int) -> list[int]:
    """Sequence lengths for documents that are not packed: `num_buckets` even steps up to `sequence_length`.

    Lengths that no document needs are left out. Steps are multiples of 128, as TPU kernels need, if sequence_length is:
    documents of 60 and 500 tokens, sequence_length 512, 4 buckets -> [128, 512].
    """
    unit = next(unit for unit in (128, 8, 1) if sequence_length % unit == 0)
    steps = {-(-sequence_length * k // (num_buckets * unit)) * unit for k in range(1, num_buckets)} | {sequence_length}
    bounds = sorted(steps)
    needed = np.unique(np.searchsorted(bounds, lengths_N))
    return [bounds[index] for index in needed.tolist()]


def fill_row(documents: Iterable[TokenizedDocument], row: dict[str, NDArray[np.generic]]) -> None:
    """Writes documents one after another into the arrays of a sequence (each [T], filled with padding). The sides of a
    pair are two documents."""
    start = 0
    for segment, document in enumerate((part for whole in documents for part in whole.parts), start=1):
        end = start + len(document)
        row["tokens"][start:end] = document.tokens
        row["segments"][start:end] = segment
        row["positions"][start:end] = np.arange(len(document))
        supervised = document.supervised[1:]
        row["targets"][start : end - 1] = np.where(supervised, document.tokens[1:], 0)
        row["weights"][start : end - 1] = np.where(supervised, np.float32(document.weight), np.float32(0))
        start = end
