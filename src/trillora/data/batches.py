"""Batches of fixed shape, each a pure function of the documents, the seed and the step.

B rows of a batch, T slots of a row. Which documents share a row is fixed for the run; each epoch visits all rows in
an order of its own. Resuming needs only the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trillora.data.documents import NOTHING_LOST, Documents, Lost
from trillora.data.pack import Rows, best_fit, bucket_lengths, fill_row, one_per_row
from trillora.errors import TrilloraError

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True)
class _Bucket:
    """Rows of one length."""

    length: int
    rows: Rows
    num_batches: int


class Batches:
    """All batches of a run. No document may be longer than `sequence_length`."""

    def __init__(
        self,
        documents: Documents,
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        pack: bool,
        num_buckets: int = 1,
        pad_id: int = 0,
        lost: Lost = NOTHING_LOST,
    ) -> None:
        if batch_size < 1 or sequence_length < 2:
            raise TrilloraError(
                f"A batch of {batch_size} rows of {sequence_length} tokens has nothing to train.",
                do="set train.batch_size to 1 or more and train.sequence_length to 2 or more",
            )
        if not documents.trained_N.any():
            raise TrilloraError("The data has no token to train on.", do="give it rows with answers")
        self.documents = documents
        self.lost = lost  # what fitting the documents to the length cost
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._seed = seed
        self._pad_id = pad_id
        self._buckets = [
            _Bucket(length, rows, -(-len(rows) // batch_size))
            for length, rows in _rows_by_length(documents, sequence_length, pack, num_buckets)
        ]
        self._latest_epoch: tuple[int, list[tuple[int, NDArray[np.intp]]]] | None = None

    @property
    def num_rows(self) -> int:
        """Rows an epoch visits, each once; padding rows not counted."""
        return sum(len(bucket.rows) for bucket in self._buckets)

    @property
    def steps_per_epoch(self) -> int:
        return sum(bucket.num_batches for bucket in self._buckets)

    @property
    def lengths(self) -> list[int]:
        """The row lengths that occur: one program is compiled for each."""
        return [bucket.length for bucket in self._buckets]

    def batch(self, step: int, places: Sequence[int] | None = None) -> Arrays:
        """Arrays [B, T]: tokens, targets, weights, segments, positions. The last of an epoch may have padding rows.

        With `places` only those rows of the batch, for a process that holds no others.
        """
        bucket, rows = self._rows_of(step)
        places = range(self.batch_size) if places is None else places
        shape = (len(places), bucket.length)
        arrays: Arrays = {
            "tokens": np.full(shape, self._pad_id, np.int32),
            "targets": np.zeros(shape, np.int32),
            "weights": np.zeros(shape, np.float32),
            "segments": np.zeros(shape, np.int32),
            "positions": np.zeros(shape, np.int32),
        }
        for number, place in enumerate(places):
            if place < len(rows):
                documents = (self.documents[index] for index in bucket.rows[rows[place]])
                fill_row(documents, {name: array[number] for name, array in arrays.items()})
        return arrays

    def length_of(self, step: int) -> int:
        """T of the step's batch."""
        return self._rows_of(step)[0].length

    def documents_of(self, step: int) -> NDArray[np.int64]:
        """Which documents a step trains on."""
        bucket, rows = self._rows_of(step)
        return np.concatenate([bucket.rows[row] for row in rows])

    def summary(self) -> dict[str, int | float]:
        """Counts of one epoch. Padding is the share of empty slots in the rows, without the last batch's filling."""
        num_tokens = int(self.documents.lengths_N.sum())
        num_slots = sum(len(bucket.rows) * bucket.length for bucket in self._buckets)
        return {
            "documents": len(self.documents),
            "rows": self.num_rows,
            "tokens": num_tokens,
            "supervised": int(self.documents.trained_N.sum()),
            "padding_fraction": 1 - num_tokens / num_slots,
        }

    def _rows_of(self, step: int) -> tuple[_Bucket, NDArray[np.intp]]:
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._latest_epoch is None or self._latest_epoch[0] != epoch:  # only saves time
            self._latest_epoch = (epoch, self._order(epoch))
        bucket, rows = self._latest_epoch[1][number]
        return self._buckets[bucket], rows

    def _order(self, epoch: int) -> list[tuple[int, NDArray[np.intp]]]:
        """The epoch's batches: rows shuffled within their bucket, then the batches of all buckets among each other."""
        batches = []
        for number, bucket in enumerate(self._buckets):
            order = _permutation(len(bucket.rows), [self._seed, epoch, number] if number else [self._seed, epoch])
            batches += [(number, order[i : i + self.batch_size]) for i in range(0, len(order), self.batch_size)]
        if len(self._buckets) == 1:
            return batches
        return [batches[i] for i in _permutation(len(batches), [self._seed, epoch, len(self._buckets)])]


def _rows_by_length(documents: Documents, sequence_length: int, pack: bool, num_buckets: int) -> list[tuple[int, Rows]]:
    if pack:
        return [(sequence_length, best_fit(documents.lengths_N, sequence_length))]
    lengths = bucket_lengths(documents.lengths_N, sequence_length, num_buckets)
    bucket_N = np.searchsorted(lengths, documents.lengths_N)
    return [(length, one_per_row(np.flatnonzero(bucket_N == number))) for number, length in enumerate(lengths)]


def _permutation(count: int, entropy: Sequence[int]) -> NDArray[np.intp]:
    """NumPy promises the raw stream of a bit generator for ever, that of `permutation` not."""
    return np.argsort(np.random.PCG64(list(entropy)).random_raw(count), kind="stable")
