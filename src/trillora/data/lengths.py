"""Statistics for `trillora inspect`: how long rows are, and what the sequence length costs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile, pairwise

import numpy as np

from trillora.data.documents import MAX_LOSS, Documents, Lost, length_that_keeps

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
    """Row lengths of an epoch in tokens, before rows are split or dropped."""

    median: int
    percentile_95: int
    longest: int
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class LostFacts:
    """Rows that are too long, and the sequence lengths that would keep them."""

    rows: int
    trained_tokens: int
    share: float  # of all trained tokens
    split_rows: int  # texts split into pieces, without loss
    refused: bool
    length_that_keeps_all: int
    length_that_keeps_99_percent: int


def length_facts(documents: Documents, sequence_length: int) -> Lengths:
    lengths = documents.lengths_N
    median, high = np.percentile(lengths, [50, 95], method="inverted_cdf").tolist()
    edges = bin_edges(int(lengths.min()), int(lengths.max()), sequence_length)
    counts = np.histogram(lengths, np.array(edges) + 0.5)[0].tolist()
    bins = [Bin(a + 1, b, n, b <= sequence_length) for (a, b), n in zip(pairwise(edges), counts, strict=True)]
    return Lengths(int(median), int(high), int(lengths.max()), tuple(dropwhile(lambda bin: not bin.rows, bins)))


def bin_edges(shortest: int, longest: int, sequence_length: int) -> list[int]:
    """Edges of about ten bins; a bin holds the lengths above one edge, up to and including the next.

    If rows are longer than `sequence_length`, it is one of the edges. Example: (1, 200, 128) -> [0, 21, 42, 64, 85,
    106, 128, 149, 170, 192, 213].
    """
    if longest <= sequence_length:
        least = -(-(longest - shortest + 1) // NUM_BINS)
        unit = 10 ** (len(str(least)) - 1)
        width = next(unit * n for n in (1, 2, 3, 4, 5, 6, 8, 10) if unit * n >= least)
        return [width * n for n in range((shortest - 1) // width, -(-longest // width) + 1)]
    if longest > NUM_BINS * sequence_length:  # even bins would put all rows that fit into one
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
