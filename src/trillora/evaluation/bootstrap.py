"""Is the adapter better than the base, or was it the choice of rows? Paired bootstrap over the rows of a test.

Rows are drawn with replacement, as many as there are, 2,000 times; each time both models are scored on the drawn rows.
The middle 95 % of the differences are the interval (percentile bootstrap; Koehn, 2004). If it does not contain 0, the
difference is beyond chance. Example: of 40 rows the base has 10 right, the adapter 22, no row got worse:

    base, adapter = shares([True] * 10 + [False] * 30), shares([True] * 22 + [False] * 18)
    differences({"exact_match": base}, {"exact_match": adapter})["exact_match"].interval()
    # Interval(difference=0.3, low=0.175, high=0.45, beyond_chance=True)

A metric is a function of sums over rows (`Sums`), so one matmul scores all drawn sets of rows.

Legend: N rows, R drawn sets of rows, K sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trillora.evaluation.result import Interval

NUM_DRAWS = 2000
MIN_ROWS = 10  # with fewer rows the interval means nothing
_CELLS = 1 << 22  # counts in memory at once

Floats = NDArray[np.float64]


def quotient(sums_RK: Floats) -> Floats:
    """The first sum divided by the second; NaN if there was nothing to count."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums_RK[:, 0] / sums_RK[:, 1]


def exp_quotient(sums_RK: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return np.exp(quotient(sums_RK))


@dataclass(frozen=True)
class Sums:
    """What a metric adds up for each row, and how the metric follows from the sums over rows."""

    values_NK: Floats
    metric: Callable[[Floats], Floats] = quotient

    @property
    def value(self) -> float:
        """The metric over all rows."""
        return float(self.metric(self.values_NK.sum(axis=0, keepdims=True))[0])


def shares(values: Iterable[float | bool | None]) -> Sums:
    """The mean of values, one per row; None: the row does not count."""
    return Sums(np.array([(0.0, 0.0) if value is None else (float(value), 1.0) for value in values]).reshape(-1, 2))


@dataclass(frozen=True)
class Difference:
    """The adapter's score minus the base's, on all rows and on every drawn set of rows."""

    observed: float
    drawn_R: Floats

    def interval(self) -> Interval:
        known = self.drawn_R[np.isfinite(self.drawn_R)]
        low, high = np.percentile(known, (2.5, 97.5)) if len(known) else (np.nan, np.nan)
        return Interval(self.observed, float(low), float(high), bool(low > 0 or high < 0))


def differences(base: Mapping[str, Sums], adapter: Mapping[str, Sums], seed: int = 0) -> dict[str, Difference]:
    """For each metric of both with at least MIN_ROWS rows. Row n of one belongs to row n of the other. Several tests
    need different seeds, or their draws would be related."""
    found: dict[str, Difference] = {}
    by_rows: dict[int, list[str]] = {}
    for name in base:
        if name in adapter and len(base[name].values_NK) >= MIN_ROWS:
            by_rows.setdefault(len(base[name].values_NK), []).append(name)
    for num_rows, names in by_rows.items():
        pairs = [(base[name], adapter[name]) for name in names]
        drawn = [
            np.concatenate(parts)
            for parts in zip(*(_scored(counts, pairs) for counts in draws(num_rows, seed)), strict=True)
        ]
        for name, (before, after), drawn_R in zip(names, pairs, drawn, strict=True):
            found[name] = Difference(after.value - before.value, drawn_R)
    return found


def draws(num_rows: int, seed: int = 0) -> Iterator[Floats]:
    """How often each row is in each drawn set [R, N], in blocks. Raw random bits, so that every version of NumPy draws
    the same rows."""
    bits = np.random.PCG64(seed)
    block = max(1, _CELLS // num_rows)
    for first in range(0, NUM_DRAWS, block):
        size = min(block, NUM_DRAWS - first)
        rows = (bits.random_raw(size * num_rows) % np.uint64(num_rows)).astype(np.int64).reshape(size, num_rows)
        cells = rows + num_rows * np.arange(size)[:, None]
        yield np.bincount(cells.ravel(), minlength=size * num_rows).reshape(size, num_rows).astype(np.float64)


def mean_difference(parts: Sequence[Difference]) -> Difference:
    """The mean over several tests. Each has rows of its own, which are drawn within it."""
    return Difference(
        float(np.mean([part.observed for part in parts])), np.mean([part.drawn_R for part in parts], axis=0)
    )


def _scored(counts_RN: Floats, pairs: Sequence[tuple[Sums, Sums]]) -> list[Floats]:
    return [
        after.metric(counts_RN @ after.values_NK) - before.metric(counts_RN @ before.values_NK)
        for before, after in pairs
    ]
