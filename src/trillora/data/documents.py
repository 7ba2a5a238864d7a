"""Documents: the slices of the stored tokens that are trained, and what happens to rows that are too long.

A document is a slice of one token array, so selecting a split, repeating a source or splitting a long text copies no
tokens. Example: a store of two texts with 5 and 3 tokens, fitted to sequence_length 3:

    tokens     10 11 12 13 14 | 20 21 22
    starts_N   [0, 5]      lengths_N [5, 3]      rows_N [0, 1]      before `fit`
    starts_N   [0, 2, 5]   lengths_N [3, 3, 3]   rows_N [0, 0, 1]   after: the first text in two pieces

Pieces share one token (12): it is the last target of the first piece and the first context of the second, so every
token but the very first is a target exactly once.

A pair is one document here, with both of its sides: it is chosen, repeated, dropped and packed as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.data.tokenizing.store import KINDS, TRAINED, Store
from trillora.errors import TrilloraError

PARTS = ("train", "validation", "test")
MAX_LOSS = 0.01  # share of the trained tokens that `on_too_long: auto` may drop
_TEXT = KINDS.index("text")


@dataclass(frozen=True)
class Documents:
    """N slices of one array of tokens. The highest bit of a token is set if it is trained."""

    tokens: NDArray[np.uint32]
    starts_N: NDArray[np.int64]
    lengths_N: NDArray[np.int64]
    trained_N: NDArray[np.int64]  # number of targets
    rows_N: NDArray[np.int64]  # index of the store's row
    weights_N: NDArray[np.float32]  # of the targets in the loss; below zero for a bad answer
    firsts_N: NDArray[np.int64]  # tokens of the chosen side of a pair; 0: not a pair
    prompts_N: NDArray[np.int64]  # tokens of the prompt of a pair or a labelled answer

    def __len__(self) -> int:
        return len(self.starts_N)

    def __getitem__(self, index: int) -> TokenizedDocument:
        tokens = self.tokens[self.starts_N[index] : self.starts_N[index] + self.lengths_N[index]]
        weight, first, prompt = float(self.weights_N[index]), int(self.firsts_N[index]), int(self.prompts_N[index])
        return TokenizedDocument((tokens & ~TRAINED).astype(np.int32), (tokens & TRAINED) != 0, weight, first, prompt)

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """The arrays with one entry per document."""
        per_row = self.rows_N, self.weights_N, self.firsts_N, self.prompts_N
        return self.starts_N, self.lengths_N, self.trained_N, *per_row

    @property
    def are_pairs(self) -> bool:
        return bool(self.firsts_N.any())

    @property
    def longest_sides_N(self) -> NDArray[np.int64]:
        """Tokens of the longer side of each pair; of other documents, all."""
        return np.maximum(self.firsts_N, self.lengths_N - self.firsts_N)

    def take(self, chosen: NDArray[np.generic]) -> Documents:
        """The documents at these indices, or where this mask is true."""
        return Documents(self.tokens, *(array[chosen] for array in self.arrays))


def answers_alone(documents: Documents) -> Documents:
    """Every answer as a document of its own, with weight 1: of a pair the chosen side, then the rejected one."""
    first, length, prompt = documents.firsts_N, documents.lengths_N, documents.prompts_N
    starts, lengths, rows = documents.starts_N, length, documents.rows_N
    if documents.are_pairs:
        starts = np.stack([starts, starts + first], axis=1).ravel()
        lengths = np.stack([first, length - first], axis=1).ravel()
        rows, prompt = np.repeat(rows, 2), np.repeat(prompt, 2)
    nothing = np.zeros_like(starts)
    ones = np.ones(len(starts), np.float32)
    alone = Documents(documents.tokens, starts, lengths, nothing, rows, ones, nothing, prompt)
    trained = [alone[index].num_supervised for index in range(len(alone))]
    return replace(alone, trained_N=np.array(trained, np.int64))


@dataclass(frozen=True)
class Lost:
    """What fitting the documents to the sequence length cost."""

    num_rows: int = 0
    num_trained: int = 0
    num_split: int = 0  # texts split into pieces, without loss


NOTHING_LOST = Lost()


def all_documents(store: Store) -> Documents:
    rows = store.rows
    start, length, trained = (rows[name].astype(np.int64) for name in ("start", "length", "trained"))
    first, prompt = (rows[name].astype(np.int64) for name in ("first", "prompt"))
    return Documents(store.tokens, start, length, trained, np.arange(len(rows)), rows["weight"], first, prompt)


def part_of(digests: NDArray[np.uint64], validation: float, test: float) -> NDArray[np.int8]:
    """Index into PARTS for each row. It depends only on the row's digest, so equal rows are always in one part. Pairs
    and labelled answers give the digest of their prompt."""
    share = digests / 2.0**64
    return np.where(share < test, 2, np.where(share < test + validation, 1, 0)).astype(np.int8)


def repeated(
    documents: Documents, weights_N: NDArray[np.float64], digests_N: NDArray[np.uint64], seed: int
) -> Documents:
    """Each document `weight` times. With weight 2.5, the seed chooses the half of the documents that come 3 times."""
    if (weights_N == 1).all():
        return documents
    chance = np.random.PCG64(seed).random_raw(1)[0]
    mixed = (digests_N ^ np.uint64(chance)) * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: an even spread
    extra = mixed / 2.0**64 < weights_N % 1
    return documents.take(np.repeat(np.arange(len(documents)), weights_N.astype(np.int64) + extra))


def fit(
    documents: Documents, kinds_N: NDArray[np.int8], sequence_length: int, policy: str, place: Callable[[int], str]
) -> tuple[Documents, Lost, TrilloraError | None]:
    """Documents of at most `sequence_length` tokens, what was lost, and the error if that is too much.

    `policy` is the option `data.on_too_long`. `auto` splits texts and drops other rows up to MAX_LOSS of the trained
    tokens; a larger loss is an error.
    """
    long_N = documents.lengths_N > sequence_length
    if not long_N.any():
        return documents, NOTHING_LOST, None
    splits_N = long_N & (kinds_N == _TEXT) & (policy in ("auto", "split"))
    lost_N = long_N & ~splits_N
    lost = Lost(int(lost_N.sum()), int(documents.trained_N[lost_N].sum()), int(splits_N.sum()))
    share = lost.num_trained / max(int(documents.trained_N.sum()), 1)
    error = None
    if lost.num_rows and policy != "drop" and (policy in ("refuse", "split") or share > MAX_LOSS):
        all_texts = bool((kinds_N[lost_N] == _TEXT).all())
        policy = "text" if all_texts else policy
        error = _too_long(documents, documents.take(lost_N), share, sequence_length, policy, place)
    fitted = documents.take(~long_N)
    if splits_N.any():
        fitted = _with_pieces(fitted, documents.take(splits_N), sequence_length)
    return fitted, lost, error


def _with_pieces(kept: Documents, texts: Documents, sequence_length: int) -> Documents:
    """The kept documents and the texts in pieces of at most `sequence_length` tokens, in the order of their rows.

    A piece starts with the last token of the previous piece, so that every target occurs exactly once.
    """
    stride = max(sequence_length - 1, 1)
    counts = -(-(texts.lengths_N - 1) // stride)
    owner = np.repeat(np.arange(len(texts)), counts)
    offsets = stride * (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts))
    lengths = np.minimum(sequence_length, texts.lengths_N[owner] - offsets)
    # All tokens of a text are trained, so a piece has one target fewer than tokens.
    starts, rows, weights = texts.starts_N[owner] + offsets, texts.rows_N[owner], texts.weights_N[owner]
    nothing = np.zeros_like(starts)
    pieces = Documents(texts.tokens, starts, lengths, lengths - 1, rows, weights, nothing, nothing)
    whole = Documents(kept.tokens, *map(np.concatenate, zip(kept.arrays, pieces.arrays, strict=True)))
    return whole.take(np.argsort(whole.rows_N, kind="stable"))


def _too_long(
    documents: Documents, lost: Documents, share: float, sequence_length: int, policy: str, place: Callable[[int], str]
) -> TrilloraError:
    order = np.argsort(-lost.lengths_N, kind="stable")[:3]
    examples = ", ".join(f"{place(int(lost.rows_N[i]))} ({lost.lengths_N[i]:,} tokens)" for i in order)
    all_kept, almost = length_that_keeps(documents, 1.0), length_that_keeps(documents, 1 - MAX_LOSS)
    remedies = [f"set train.sequence_length to {all_kept:,} to keep all"]
    if sequence_length < almost < all_kept:
        remedies.append(f"{almost:,} to lose at most {MAX_LOSS:.0%} of the trained tokens")
    if policy == "text":
        remedies.append("data.on_too_long: split to split texts into pieces, without loss")
    elif not policy.startswith("truncate"):
        remedies.append("data.on_too_long: truncate-middle to shorten prompts and keep answers")
    remedies.append("data.on_too_long: drop to train without these rows")
    rows, longer = "rows", f"longer than sequence_length {sequence_length:,}"
    if documents.are_pairs:
        rows, longer = "pairs", f"{longer}, which has to hold both answers, each with the prompt"
    what = (
        f"{len(lost):,} of {len(documents):,} {rows} are {longer}: "
        f"without them, {share:.1%} of the trained tokens would be lost."
    )
    return TrilloraError(what, where=examples, do="; or ".join(remedies))


def length_that_keeps(documents: Documents, share: float) -> int:
    """The shortest sequence length that keeps this share of the trained tokens."""
    order = np.argsort(documents.lengths_N, kind="stable")
    trained = np.cumsum(documents.trained_N[order])
    index = int(np.searchsorted(trained, share * trained[-1] - 1e-9))
    return int(documents.lengths_N[order][min(index, len(order) - 1)])
