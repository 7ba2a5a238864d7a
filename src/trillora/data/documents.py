"""Which stretches of the stored tokens are trained as documents, and what became of rows that are too long.

A document is a slice of the store: choosing a part of the data, repeating a source or splitting a long text copies
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.data.tokenizing.store import KINDS, TRAINED, Store
from trillora.errors import TrilloraError

PARTS = ("train", "validation", "test")
MAX_LOSS = 0.01  # share of the trained tokens that `auto` may drop
_TEXT = KINDS.index("text")


@dataclass(frozen=True)
class Documents:
    """N slices of one array of tokens, whose highest bit says what is trained."""

    tokens: NDArray[np.uint32]
    starts_N: NDArray[np.int64]
    lengths_N: NDArray[np.int64]
    trained_N: NDArray[np.int64]  # tokens the loss sees
    rows_N: NDArray[np.int64]  # the store's row each is taken from

    def __len__(self) -> int:
        return len(self.starts_N)

    def __getitem__(self, index: int) -> TokenizedDocument:
        stretch = self.tokens[self.starts_N[index] : self.starts_N[index] + self.lengths_N[index]]
        return TokenizedDocument((stretch & ~TRAINED).astype(np.int32), (stretch & TRAINED) != 0)

    def take(self, chosen: NDArray[np.generic]) -> Documents:
        """The documents at these places, or where this mask is true."""
        arrays = (self.starts_N, self.lengths_N, self.trained_N, self.rows_N)
        return Documents(self.tokens, *(array[chosen] for array in arrays))

    @staticmethod
    def of(rendered: Sequence[TokenizedDocument]) -> Documents:
        """Documents that lie in memory."""
        lengths = np.array([len(document) for document in rendered], np.int64)
        tokens = [
            np.where(d.supervised, d.tokens.view(np.uint32) | TRAINED, d.tokens.view(np.uint32)) for d in rendered
        ]
        return Documents(
            np.concatenate([np.empty(0, np.uint32), *tokens]),
            np.cumsum(lengths) - lengths,
            lengths,
            np.array([document.num_supervised for document in rendered], np.int64),
            np.arange(len(lengths)),
        )


@dataclass(frozen=True)
class Lost:
    """What fitting documents into rows cost."""

    num_rows: int = 0
    num_trained: int = 0
    num_split: int = 0  # texts cut into pieces, without loss


NOTHING_LOST = Lost()


def all_documents(store: Store) -> Documents:
    rows = store.rows
    start, length, trained = (rows[name].astype(np.int64) for name in ("start", "length", "trained"))
    return Documents(store.tokens, start, length, trained, np.arange(len(rows)))


def part_of(digests: NDArray[np.uint64], validation: float, test: float) -> NDArray[np.int8]:
    """For each row the part it belongs to, by its own digest alone: equal rows are always together."""
    share = digests / 2.0**64
    return np.where(share < test, 2, np.where(share < test + validation, 1, 0)).astype(np.int8)


def repeated(
    documents: Documents, weights_N: NDArray[np.float64], digests_N: NDArray[np.uint64], seed: int
) -> Documents:
    """Each document as many times as its weight says; the fraction left over is given to some, chosen by the seed."""
    if (weights_N == 1).all():
        return documents
    chance = np.random.PCG64(seed).random_raw(1)[0]
    mixed = (digests_N ^ np.uint64(chance)) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: an even spread
    extra = mixed / 2.0**64 < weights_N % 1
    return documents.take(np.repeat(np.arange(len(documents)), weights_N.astype(np.int64) + extra))


def fit(
    documents: Documents,
    kinds_N: NDArray[np.int8],
    sequence_length: int,
    policy: str,
    place: Callable[[int], str],
) -> tuple[Documents, Lost]:
    """Documents of at most `sequence_length` tokens. Nothing trained is lost in silence."""
    long_N = documents.lengths_N > sequence_length
    if not long_N.any():
        return documents, NOTHING_LOST
    splits_N = long_N & (kinds_N == _TEXT) & (policy in ("auto", "split"))
    lost_N = long_N & ~splits_N
    lost = Lost(int(lost_N.sum()), int(documents.trained_N[lost_N].sum()), int(splits_N.sum()))
    share = lost.num_trained / max(int(documents.trained_N.sum()), 1)
    if lost.num_rows and policy != "drop" and (policy in ("refuse", "split") or share > MAX_LOSS):
        all_texts = bool((kinds_N[lost_N] == _TEXT).all())
        raise _too_long(documents, lost_N, share, sequence_length, "text" if all_texts else policy, place)
    kept = documents.take(~long_N)
    return (_with_pieces(kept, documents.take(splits_N), sequence_length) if splits_N.any() else kept), lost


def _with_pieces(kept: Documents, texts: Documents, sequence_length: int) -> Documents:
    """Long texts in pieces of at most `sequence_length` tokens.

    A piece begins with the last token of the piece before, so that no target is lost at a seam and none counts twice.
    """
    stride = max(sequence_length - 1, 1)
    counts = -(-(texts.lengths_N - 1) // stride)
    owner = np.repeat(np.arange(len(texts)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    offsets = number * stride
    lengths = np.minimum(sequence_length, texts.lengths_N[owner] - offsets)
    pieces = Documents(
        texts.tokens, texts.starts_N[owner] + offsets, lengths, lengths - 1, texts.rows_N[owner]
    )  # a text is trained whole
    joined = [
        np.concatenate([getattr(kept, n), getattr(pieces, n)]) for n in ("starts_N", "lengths_N", "trained_N", "rows_N")
    ]
    whole = Documents(kept.tokens, *joined)
    return whole.take(np.argsort(whole.rows_N, kind="stable"))


def _too_long(
    documents: Documents,
    lost_N: NDArray[np.bool_],
    share: float,
    sequence_length: int,
    policy: str,
    place: Callable[[int], str],
) -> TrilloraError:
    order = np.argsort(-documents.lengths_N[lost_N], kind="stable")[:3]
    examples = ", ".join(
        f"{place(int(documents.rows_N[lost_N][i]))} ({documents.lengths_N[lost_N][i]:,} tokens)" for i in order
    )
    ways = [f"set train.sequence_length to {length_that_keeps(documents, 1.0):,} to keep all"]
    almost = length_that_keeps(documents, 1 - MAX_LOSS)
    if sequence_length < almost < length_that_keeps(documents, 1.0):
        ways.append(f"{almost:,} to lose at most {MAX_LOSS:.0%} of the trained tokens")
    if policy == "text":
        ways.append("data.on_too_long: split to cut texts into pieces, without loss")
    elif not policy.startswith("truncate"):
        ways.append("data.on_too_long: truncate-middle to shorten prompts and keep answers")
    ways.append("data.on_too_long: drop to train without these rows")
    return TrilloraError(
        f"{int(lost_N.sum()):,} of {len(documents):,} rows are longer than sequence_length {sequence_length:,}, and "
        f"with them {share:.1%} of the trained tokens would be lost.",
        where=examples,
        do="; or ".join(ways),
    )


def length_that_keeps(documents: Documents, share: float) -> int:
    """The shortest sequence length at which documents with this share of the trained tokens fit."""
    order = np.argsort(documents.lengths_N, kind="stable")
    trained = np.cumsum(documents.trained_N[order])
    index = int(np.searchsorted(trained, share * trained[-1] - 1e-9))
    return int(documents.lengths_N[order][min(index, len(order) - 1)])
