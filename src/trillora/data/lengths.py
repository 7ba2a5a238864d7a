"""How long rows are, and what the sequence length does to them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile, pairwise

import numpy as np

from trillora.data.documents import MAX_LOSS, Documents, Lost, fit, length_that_keeps
from trillora.data.prepare import Dataset
from trillora.data.tokenizing.store import KINDS
from trillora.errors import TrilloraError

NUM_BINS = 10


@dataclass(frozen=True)
class Bin:
    """Rows of `first` to `last` tokens."""

    first: int
    last: int
    rows: int
    fits: bool  # into the sequence length


@dataclass(frozen=True)
class Lengths:
    """How long the rows of an epoch are, in tokens, before any is split or left out."""

    median: int
    percentile_95: int
    longest: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class LostFacts:
    """What the sequence length costs."""

    rows: int
    trained_tokens: int
    share: float  # of all trained tokens
    split_rows: int  # texts cut into pieces, without loss
    refused: bool
    length_that_keeps_all: int
    length_that_keeps_99_percent: int


def fitted_or_refused(
    dataset: Dataset, documents: Documents, sequence_length: int
) -> tuple[Documents, Lost, TrilloraError | None]:
    """As training fits them; where training would refuse, what is left without the rows that are too long."""
    kinds, policy, place = (
        dataset.store.rows["kind"][documents.rows_N],
        dataset.options.on_too_long,
        dataset.store.place,
    )
    try:
        return *fit(documents, kinds, sequence_length, policy, place), None
    except TrilloraError as refusal:
        splits_N = (kinds == KINDS.index("text")) & (policy in ("auto", "split"))
        lost_N = (documents.lengths_N > sequence_length) & ~splits_N
        kept, rest = fit(documents.take(~lost_N), kinds[~lost_N], sequence_length, policy, place)
        lost = Lost(int(lost_N.sum()), int(documents.trained_N[lost_N].sum()), rest.num_split)
        return kept, lost, refusal


def length_facts(documents: Documents, sequence_length: int) -> Lengths:
    lengths = documents.lengths_N
    median, high = np.percentile(lengths, [50, 95], method="inverted_cdf").tolist()
    edges = bin_edges(int(lengths.min()), int(lengths.max()), sequence_length)
    counts = np.histogram(lengths, np.array(edges) + 0.5)[0].tolist()
    bins = [Bin(a + 1, b, n, b <= sequence_length) for (a, b), n in zip(pairwise(edges), counts, strict=True)]
    return Lengths(int(median), int(high), int(lengths.max()), tuple(dropwhile(lambda bin: not bin.rows, bins)))


def bin_edges(shortest: int, longest: int, sequence_length: int) -> list[int]:
    """Borders of about ten bins: each holds the lengths above one border up to the next.

    Where rows are longer than a sequence, its length is one of them.
    """
    if longest <= sequence_length:
        least = -(-(longest - shortest + 1) // NUM_BINS)
        unit = 10 ** (len(str(least)) - 1)
        width = next(unit * n for n in (1, 2, 3, 4, 5, 6, 8, 10) if unit * n >= least)
        return [width * n for n in range((shortest - 1) // width, -(-longest // width) + 1)]
    if longest > NUM_BINS * sequence_length:  # even steps would hide what fits
        doubled = [sequence_length >> 2, sequence_length >> 1, sequence_length]
        while doubled[-1] < longest:
            doubled.append(2 * doubled[-1])
        return sorted({0, *doubled})
    parts = max(round(NUM_BINS * sequence_length / longest), 1)
    return sorted({sequence_length * n // parts for n in range(-(-longest * parts // sequence_length) + 1)})


def lost_facts(documents: Documents, lost: Lost, refused: bool) -> LostFacts:
    return LostFacts(
        rows=lost.num_rows,
        trained_tokens=lost.num_trained,
        share=lost.num_trained / max(int(documents.trained_N.sum()), 1),
        split_rows=lost.num_split,
        refused=refused,
        length_that_keeps_all=length_that_keeps(documents, 1.0),
        length_that_keeps_99_percent=length_that_keeps(documents, 1 - MAX_LOSS),
    )
