"""Batches of fixed shape, each a pure function of the documents, the seed and the step.

B sequences in a batch, T tokens in a sequence. Which documents share a sequence is fixed for the run; each epoch visits
all sequences in its own order. To resume, only the step is needed.

Example: documents of 3, 5 and 6 tokens, batch_size 2, sequence_length 8, packed: the first two share a sequence, so an
epoch has 2 sequences and is one step. `batch(0)` and `batch(1)` hold the same two sequences, maybe in another order.

The two sides of a pair are next to each other in one sequence: segment 1 is a chosen answer with its prompt, 2 the
rejected one with the same prompt, 3 the next chosen one. Weights of rejected and of bad answers are below zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trillora.data.documents import NOTHING_LOST, Documents, Lost
from trillora.data.mismatched import Mismatched
from trillora.data.pack import PackedRows, best_fit, bucket_lengths, fill_row, one_per_row
from trillora.data.padding import padding_warning
from trillora.errors import TrilloraError

Arrays = dict[str, NDArray[np.generic]]
OTHER = "other_"  # in front of the names of the arrays with mismatched documents
_DTYPES = {"targets": np.int32, "weights": np.float32, "segments": np.int32, "positions": np.int32}


class _Bucket(NamedTuple):
    """Sequences of one length."""

    length: int
    rows: PackedRows


class Batches:
    """All batches of a run. No document may be longer than `sequence_length`.

    With `shrink`, documents that do not fill one batch make a smaller batch; otherwise empty sequences complete it.
    With `mismatched`, every batch has five more arrays: `other_tokens` and so on, with the same segments, in which each
    document is its prompt with the answer of another row (`mismatched.Mismatched`). With `references` it has one more,
    `reference`: numbers of every token that were computed before.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        batch_size: int,
        sequence_length: int,
        pack: bool,
        seed: int = 0,
        num_buckets: int = 1,
        pad_id: int = 0,
        lost: Lost = NOTHING_LOST,
        shrink: bool = False,
        mismatched: bool = False,
    ) -> None:
        if batch_size < 1 or sequence_length < 2:
            what = f"A batch of {batch_size} sequences of {sequence_length} tokens has nothing to train on."
            raise TrilloraError(what, do="set train.batch_size to 1 or more and train.sequence_length to 2 or more")
        if not documents.trained_N.any():
            raise TrilloraError("The data has no token to train on.", do="add rows that have an answer")
        self._others = Mismatched(documents, sequence_length, seed) if mismatched else None
        needed_N = documents.lengths_N  # tokens of a sequence that each document needs
        if self._others is not None:
            needed_N = np.maximum(needed_N, self._others.lengths_N)
        buckets = _buckets(needed_N, sequence_length, pack, num_buckets)
        num_rows = sum(len(bucket.rows) for bucket in buckets)
        if shrink:
            batch_size = min(batch_size, num_rows)
        self.documents = documents
        self.lost = lost  # what fitting the documents to the length cost
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._pack = pack
        self._seed = seed
        self._pad_id = pad_id
        self._buckets = buckets
        # The sequence lengths that occur: one program is compiled for each.
        self.lengths = [bucket.length for bucket in self._buckets]
        # Sequences of an epoch, and the tokens they have room for, without the empty ones that complete a batch.
        self.num_rows = num_rows
        self.num_slots = sum(len(bucket.rows) * bucket.length for bucket in self._buckets)
        num_batches = [-(-len(bucket.rows) // batch_size) for bucket in self._buckets]
        self.steps_per_epoch = sum(num_batches)
        num_computed = sum(n * batch_size * length for n, length in zip(num_batches, self.lengths, strict=True))
        # Share of an epoch's computed tokens that are padding, with the empty sequences that complete a batch.
        self.padding_fraction = 1 - int(documents.lengths_N.sum()) / num_computed
        self._latest_epoch: tuple[int, list[tuple[int, NDArray[np.intp]]]] | None = None
        self.references: Sequence[NDArray[np.float32]] = ()  # of each bucket: [its sequences, their length]

    def padding_warning(self) -> str | None:
        """A sentence with the remedy if an epoch computes mostly padding, else None."""
        return padding_warning(
            self.padding_fraction,
            pack=self._pack,
            sequence_length=self.sequence_length,
            longest_document=int(self.documents.lengths_N.max()),
            num_sequences=self.num_rows,
            batch_size=self.batch_size,
            unit="pair" if self.documents.are_pairs else "document",
        )

    def batch(self, step: int, places: Sequence[int] | None = None) -> Arrays:
        """Arrays [B, T]: tokens, targets, weights, segments, positions. An epoch's last batch may have empty sequences.

        `places` selects sequences of the batch, for a process that holds only those.
        """
        places = range(self.batch_size) if places is None else places
        bucket, rows = self._rows_of(step)
        return self.sequences(bucket, [int(rows[place]) if place < len(rows) else None for place in places])

    def sequences(self, bucket: int, rows: Sequence[int | None]) -> Arrays:
        """The arrays of these sequences of a bucket. None: an empty one."""
        arrays = self._filled(self.documents, bucket, rows)
        if self._others is not None:
            others = self._filled(self._others, bucket, rows)
            arrays |= {f"{OTHER}{name}": array for name, array in others.items()}
        if self.references:
            of_bucket = self.references[bucket]
            nothing = np.zeros(of_bucket.shape[1], np.float32)
            arrays["reference"] = np.stack([nothing if row is None else of_bucket[row] for row in rows])
        return arrays

    def _filled(self, documents: Documents | Mismatched, bucket: int, rows: Sequence[int | None]) -> Arrays:
        length, packed = self._buckets[bucket]
        shape = (len(rows), length)
        arrays: Arrays = {"tokens": np.full(shape, self._pad_id, np.int32)}
        arrays |= {name: np.zeros(shape, dtype) for name, dtype in _DTYPES.items()}
        for number, row in enumerate(rows):
            if row is not None:
                fill_row((documents[index] for index in packed[row]), {n: array[number] for n, array in arrays.items()})
        return arrays

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Of each bucket: how many sequences it has, and their length."""
        return [(len(bucket.rows), bucket.length) for bucket in self._buckets]

    def length_of(self, step: int) -> int:
        """T of a step's batch."""
        return self._buckets[self._rows_of(step)[0]].length

    def documents_of(self, step: int) -> NDArray[np.int64]:
        """Indices of the documents that a step trains on."""
        bucket, rows = self._rows_of(step)
        return np.concatenate([self._buckets[bucket].rows[row] for row in rows])

    def segments_of(self, step: int) -> NDArray[np.int64]:
        """The index of the document that each segment of a step's batch belongs to, one sequence after the other."""
        documents = self.documents_of(step)
        return np.repeat(documents, np.where(self.documents.firsts_N[documents], 2, 1))

    def documents_in(self, block: int) -> int:
        """How many documents begin in the same block at most, if sequences are cut into blocks of `block` tokens.
        Padding counts as a document, and so does each side of a pair."""
        lengths_N, firsts_N = self.documents.lengths_N, self.documents.firsts_N
        counts = [rows.most_in(block, lengths_N, length, firsts_N) for length, rows in self._buckets]
        if self._others is not None:
            counts += [rows.most_in(block, self._others.lengths_N, length) for length, rows in self._buckets]
        return max(counts)

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document, where each side of a pair and each mismatched document counts as one."""
        firsts_N = self.documents.firsts_N
        longest = int(np.maximum(firsts_N, self.documents.lengths_N - firsts_N).max())
        return longest if self._others is None else max(longest, int(self._others.lengths_N.max()))

    def summary(self) -> dict[str, int | float]:
        """Counts of one epoch. `padding_fraction` leaves out the empty sequences that complete a batch."""
        num_tokens = int(self.documents.lengths_N.sum())
        return {
            "documents": len(self.documents),
            "rows": self.num_rows,
            "tokens": num_tokens,
            "supervised": int(self.documents.trained_N.sum()),
            "padding_fraction": 1 - num_tokens / self.num_slots,
        }

    def _rows_of(self, step: int) -> tuple[int, NDArray[np.intp]]:
        """The bucket of a step, and its sequences."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._latest_epoch is None or self._latest_epoch[0] != epoch:
            self._latest_epoch = (epoch, self._order(epoch))
        return self._latest_epoch[1][number]

    def _order(self, epoch: int) -> list[tuple[int, NDArray[np.intp]]]:
        """An epoch's batches: sequences are shuffled within their bucket, then the batches of all buckets."""
        batches = []
        for number, bucket in enumerate(self._buckets):
            order = _permutation(len(bucket.rows), [self._seed, epoch, number] if number else [self._seed, epoch])
            batches += [(number, order[i : i + self.batch_size]) for i in range(0, len(order), self.batch_size)]
        if len(self._buckets) == 1:
            return batches
        return [batches[i] for i in _permutation(len(batches), [self._seed, epoch, len(self._buckets)])]


def _buckets(lengths_N: NDArray[np.int64], sequence_length: int, pack: bool, num_buckets: int) -> list[_Bucket]:
    if pack:
        return [_Bucket(sequence_length, best_fit(lengths_N, sequence_length))]
    lengths = bucket_lengths(lengths_N, sequence_length, num_buckets)
    bucket_N = np.searchsorted(lengths, lengths_N)
    return [_Bucket(length, one_per_row(np.flatnonzero(bucket_N == number))) for number, length in enumerate(lengths)]


def _permutation(count: int, entropy: Sequence[int]) -> NDArray[np.intp]:
    """A permutation that is the same in every NumPy version: only raw streams are guaranteed to be stable."""
    return np.argsort(np.random.PCG64(list(entropy)).random_raw(count), kind="stable")
