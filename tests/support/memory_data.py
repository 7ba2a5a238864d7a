"""Documents and datasets in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from trillora.data.documents import Documents
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.data.tokenizing.store import TRAINED


def some_documents(rng: random.Random, number: int, longest: int) -> list[TokenizedDocument]:
    documents = []
    for _ in range(number):
        length = rng.randint(2, longest)
        tokens = np.array([rng.randint(1, 999) for _ in range(length)], np.int32)
        supervised = np.array([rng.random() < 0.5 for _ in range(length)], np.bool_)
        supervised[-1] = True
        documents.append(TokenizedDocument(tokens, supervised))
    return documents


def in_memory(documents: Sequence[TokenizedDocument]) -> Documents:
    """Documents without a store."""
    lengths = np.array([len(document) for document in documents], np.int64)
    tokens = [np.where(d.supervised, d.tokens.view(np.uint32) | TRAINED, d.tokens.view(np.uint32)) for d in documents]
    return Documents(
        np.concatenate([np.empty(0, np.uint32), *tokens]),
        np.cumsum(lengths) - lengths,
        lengths,
        np.array([document.num_supervised for document in documents], np.int64),
        np.arange(len(lengths)),
        np.array([document.weight for document in documents], np.float32),
        np.array([document.first for document in documents], np.int64),
        np.array([document.prompt for document in documents], np.int64),
    )
