"""Answers at the wrong prompt: what a loss of labels needs to estimate how far the model is from its reference.

Each document has a partner, another row, and the mismatched document is its own prompt followed by the answer of the
partner. Example, with prompts of two tokens and the partner of each in the next line (the last one has the first):

    1 5 [7 2]        mismatched   1 5 [8 9 2]
    1 6 [8 9 2]                   1 6 [4 2]
    1 3 [4 2]                     1 3 [7 2]

Partners are fixed for a run: a rotation of the rows in an order drawn from the seed, so no row is its own partner.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trillora.data.documents import Documents
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.errors import TrilloraError

_STREAM = 0x6B746F  # keeps these random numbers apart from those that order the sequences


class Mismatched:
    """The mismatched document of each document. An answer that does not fit is shortened at its end."""

    def __init__(self, documents: Documents, sequence_length: int, seed: int) -> None:
        self._documents = documents
        self.partners_N = partners_of(documents.rows_N, seed)
        answers_N = documents.lengths_N - documents.prompts_N
        self.lengths_N = np.minimum(documents.prompts_N + answers_N[self.partners_N], sequence_length)

    def __getitem__(self, index: int) -> TokenizedDocument:
        own, partner = self._documents[index], self._documents[int(self.partners_N[index])]
        prompt, length = own.tokens[: own.prompt], int(self.lengths_N[index])
        tokens = np.concatenate([prompt, partner.tokens[partner.prompt :]])[:length]
        supervised = np.concatenate([np.zeros(len(prompt), np.bool_), partner.supervised[partner.prompt :]])[:length]
        return TokenizedDocument(tokens, supervised)


def partners_of(rows_N: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """The index of the document that each one takes an answer from. Copies of a row have the same partner, which is
    another row."""
    rows, first, row_of_N = np.unique(rows_N, return_index=True, return_inverse=True)
    if len(rows) < 2:
        what = f"A loss of labels compares at least two rows, and there is {len(rows)} to train or to evaluate on."
        raise TrilloraError(what, where="train.loss", do="add rows")
    order = np.argsort(np.random.PCG64([seed, _STREAM]).random_raw(len(rows)), kind="stable")
    partner = np.empty(len(rows), np.int64)
    partner[order] = np.roll(order, -1)
    partners_N: NDArray[np.int64] = first[partner][row_of_N.reshape(-1)]
    return partners_N
