"""Batches of fixed shape, each a pure function of the documents, the seed and the step.

B rows of a batch, T slots of a row. Which documents share a row is fixed for the run; each epoch visits all rows in
an order of its own. Resuming needs only the step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trillora.data.encode import Rendered
from trillora.data.pack import best_fit, fill_row, one_per_row
from trillora.errors import TrilloraError


class Batches:
    """All batches of a run. No document may be longer than `sequence_length`."""

    def __init__(
        self,
        documents: Sequence[Rendered],
        *,
        batch_size: int,
        sequence_length: int,
        seed: int,
        pack: bool,
        pad_id: int = 0,
    ) -> None:
        if batch_size < 1 or sequence_length < 2:
            raise TrilloraError(
                f"A batch of {batch_size} rows of {sequence_length} tokens has nothing to train.",
                do="set train.batch_size to 1 or more and train.sequence_length to 2 or more",
            )
        if not any(document.num_supervised for document in documents):
            raise TrilloraError("The data has no token to train on.", do="give it rows with answers")
        lengths = [len(document) for document in documents]
        self._documents = documents
        self._rows = best_fit(lengths, sequence_length) if pack else one_per_row(lengths)
        self.batch_size = batch_size
        self.sequence_length = sequence_length
        self._seed = seed
        self._pad_id = pad_id
        self._latest_order: tuple[int, NDArray[np.intp]] = (0, _order(len(self._rows), seed, 0))

    @property
    def num_rows(self) -> int:
        """Rows an epoch visits, each once; padding rows not counted."""
        return len(self._rows)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_rows // self.batch_size)

    def batch(self, step: int) -> dict[str, NDArray[np.generic]]:
        """Arrays [B, T]: tokens, targets, weights, segments, positions. The last of an epoch may have padding rows."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if self._latest_order[0] != epoch:  # only saves time: the order depends on seed and epoch alone
            self._latest_order = (epoch, _order(self.num_rows, self._seed, epoch))
        rows = self._latest_order[1][number * self.batch_size : (number + 1) * self.batch_size]
        shape = (self.batch_size, self.sequence_length)
        arrays: dict[str, NDArray[np.generic]] = {
            "tokens": np.full(shape, self._pad_id, np.int32),
            "targets": np.zeros(shape, np.int32),
            "weights": np.zeros(shape, np.float32),
            "segments": np.zeros(shape, np.int32),
            "positions": np.zeros(shape, np.int32),
        }
        for place, row in enumerate(rows):
            documents = [self._documents[index] for index in self._rows[row]]
            fill_row(documents, {name: array[place] for name, array in arrays.items()})
        return arrays

    def summary(self) -> dict[str, int | float]:
        """Counts of one epoch. Padding is the share of empty slots in the rows, without the last batch's filling."""
        num_tokens = sum(map(len, self._documents))
        return {
            "documents": len(self._documents),
            "rows": self.num_rows,
            "tokens": num_tokens,
            "supervised": sum(document.num_supervised for document in self._documents),
            "padding_fraction": 1 - num_tokens / (self.num_rows * self.sequence_length),
        }


def _order(num_rows: int, seed: int, epoch: int) -> NDArray[np.intp]:
    """The epoch's permutation. NumPy promises the raw stream of a bit generator for ever, that of `permutation` not."""
    return np.argsort(np.random.PCG64([seed, epoch]).random_raw(num_rows), kind="stable")
