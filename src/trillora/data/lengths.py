"""Statistics for `trillora inspect`: how long rows are, what the sequence length costs, and what pairs and labels have
in common that a model could learn instead of what is meant."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile, pairwise

import numpy as np
from numpy.typing import NDArray

from trillora.data.documents import MAX_LOSS, Documents, Lost, length_that_keeps
from trillora.recipe.losses import LossOptions

NUM_BINS = 10
MOST_LONGER = 0.6  # share of pairs whose chosen answer is the longer one; further from a half, length decides too much
MOST_GOOD = 4 / 3  # weight of all good answers, as a multiple of all bad ones; the least is 1
_BY_MEAN = ("sigmoid_norm", "simpo", "ipo", "orpo", "sft")  # losses in which a longer answer does not count more


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


@dataclass(frozen=True)
class PairFacts:
    """Chosen and rejected answers of an epoch, in tokens."""

    pairs: int
    prompts: int  # different ones
    chosen_longer: int  # pairs
    equally_long: int
    mean_chosen: float
    mean_rejected: float
    warns: bool  # whether a loss of this recipe would learn the length first

    @property
    def share_longer(self) -> float:
        """Of the pairs whose answers have different lengths."""
        return self.chosen_longer / max(self.pairs - self.equally_long, 1)


@dataclass(frozen=True)
class LabelFacts:
    """Good and bad answers of an epoch."""

    good: int
    bad: int
    desirable_weight: float  # of the recipe
    undesirable_weight: float
    balance: float | None  # weight of all good answers, as a multiple of all bad ones; None without bad ones

    @property
    def is_balanced(self) -> bool:
        return self.balance is not None and 1 - 1e-9 <= self.balance <= MOST_GOOD + 1e-9


def pair_facts(documents: Documents, splits_N: NDArray[np.uint64], train: LossOptions) -> PairFacts | None:
    """Of the training part; None if it has no pairs. `splits_N`: the digests of the prompts."""
    if not documents.are_pairs:
        return None
    chosen_N = documents.firsts_N - documents.prompts_N
    rejected_N = documents.lengths_N - documents.firsts_N - documents.prompts_N
    longer, equal = int((chosen_N > rejected_N).sum()), int((chosen_N == rejected_N).sum())
    has_length = train.ld_alpha == 1 and any(name not in _BY_MEAN for name in train.losses)
    share = longer / max(len(documents) - equal, 1)
    is_biased = equal < len(documents) and not 1 - MOST_LONGER <= share <= MOST_LONGER
    return PairFacts(
        pairs=len(documents),
        prompts=len(np.unique(splits_N)),
        chosen_longer=longer,
        equally_long=equal,
        mean_chosen=float(chosen_N.mean()),
        mean_rejected=float(rejected_N.mean()),
        warns=has_length and is_biased,
    )


def label_facts(documents: Documents, train: LossOptions) -> LabelFacts | None:
    """Of the training part; None if its rows have no label."""
    if train.rows != "labels" or not len(documents):
        return None
    weights = documents.weights_N.astype(np.float64)
    good, bad = float(weights[weights > 0].sum()), float(-weights[weights < 0].sum())
    bad *= train.undesirable_weight
    return LabelFacts(
        good=int((weights > 0).sum()),
        bad=int((weights < 0).sum()),
        desirable_weight=train.desirable_weight,
        undesirable_weight=train.undesirable_weight,
        balance=good * train.desirable_weight / bad if bad else None,
    )


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
