"""How much of what was trained survives the rounding of an export, before anything is written.

    check_carries(weights, "q4_1", rounded, {"q8_0": …, "f16": …})
    TrilloraError: q4_1 keeps 11 % of what was trained. do: use --type q8_0 or f16

The figure is the share of the change: the projection of (rounded - base) on the trained change, 1 if nothing is lost.
Rounding usually adds noise that is independent of the change, and the share stays near 1 even with 4 bits. But a base
whose values already lie on the grid of the type, because it was quantized before, takes back every change that is
smaller than half a step. So does bfloat16, if the change is much smaller than its steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from trillora.errors import TrilloraError
from trillora.export.merged_weights import MergedWeights

LEAST_SHARE = 0.5  # of the change; an export with less is another model than the one that was trained
SAMPLE = 1 << 17  # values of each tensor that are looked at, in whole rows
Rounding = Callable[[MergedWeights, str, np.ndarray], np.ndarray]  # (weights, name, rows) -> rows as they are stored


@dataclass
class Share:
    """The share of the change, over any number of tensors. Sums are in float64."""

    along: float = 0.0  # <rounded - base, change>
    square: float = 0.0  # <change, change>
    noise: float = 0.0  # sum of (error * change)^2

    def add(self, rounded: np.ndarray, exact: np.ndarray, base: np.ndarray) -> None:
        change = exact - base
        self.along += float(np.sum((rounded - base) * change, dtype=np.float64))
        self.square += float(np.sum(np.square(change), dtype=np.float64))
        self.noise += float(np.sum(np.square((rounded - exact) * change), dtype=np.float64))

    @property
    def value(self) -> float | None:
        return self.along / self.square if self.square else None

    @property
    def is_lost(self) -> bool:
        """Whether it is below the least share by more than the noise of rounding, which small models show."""
        return self.square > 0 and self.along + 3 * self.noise**0.5 < LEAST_SHARE * self.square


def check_carries(weights: MergedWeights, type: str, rounded: Rounding, finer: Mapping[str, Rounding]) -> None:
    """Refuses a type that would lose what was trained, and names types that keep it."""
    found = share_of(weights, rounded)
    if not found.is_lost:
        return
    kept = [name for name, rounding in finer.items() if not share_of(weights, rounding).is_lost]
    percent = 100 * max(0.0, found.value or 0.0)
    raise TrilloraError(
        f"{type} keeps {percent:.0f} % of what was trained: the change of most weights is smaller than half a step of "
        "this type, and is rounded away.",
        where="--type",
        do=f"use --type {' or '.join(kept)}" if kept else "train for more steps, or with a higher learning rate",
    )


def share_of(weights: MergedWeights, rounded: Rounding) -> Share:
    """By a sample of rows of every tensor that the adapter changes."""
    share = Share()
    for name in weights.names:
        if not weights.is_trained(name):
            continue
        for start, stop in _sample(weights.shape(name)):
            exact, base = weights.rows(name, start, stop), weights.base_rows(name, start, stop)
            if exact.shape == base.shape:
                share.add(rounded(weights, name, exact), exact, base)
    return share


def _sample(shape: tuple[int, ...]) -> list[tuple[int, int]]:
    """Rows from four places of a tensor, or all of a small one."""
    width = int(np.prod(shape[1:], dtype=np.int64))
    num_rows = max(1, SAMPLE // max(1, width) // 4)
    if 4 * num_rows >= shape[0]:
        return [(0, shape[0])]
    starts = np.linspace(0, shape[0] - num_rows, 4).astype(int)
    return [(int(start), int(start) + num_rows) for start in starts]
