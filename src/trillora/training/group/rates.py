"""The search for a learning rate: many rates start, and the worse half is dropped at fixed steps until one is left.

    >>> selections(1000)
    [Selection(step=15, keep=4), Selection(step=30, keep=2), Selection(step=60, keep=1)]

The winner is not started again: it has been a whole run with its rate from the first step on. With these fractions the
others cost 15 + 15 + 30 = …

The rates are judged by their training loss on the same rows, which costs nothing and compares pairs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FRACTIONS = ((0.015, 4), (0.03, 2), (0.06, 1))  # of all steps, and how many rates are left then


@dataclass(frozen=True)
class Selection:
    """After `step` steps the best `keep` adapters go on."""

    step: int
    keep: int


def selections(num_steps: int) -> list[Selection]:
    """When rates are dropped in a run of `num_steps` steps, and how many are left."""
    found: dict[int, Selection] = {}
    for fraction, keep in FRACTIONS:
        step = min(max(round(fraction * num_steps), 4), num_steps)
        found[step] = Selection(step, keep)
    return list(found.values())


def score(losses: Sequence[float]) -> float:
    """What a rate is judged by: the mean loss of the last half of its steps since the last selection."""
    recent = losses[len(losses) // 2 :]
    mean = sum(recent) / max(len(recent), 1)
    return mean if math.isfinite(mean) and recent else math.inf


def best(scores: Sequence[float], keep: int) -> list[int]:
    """The numbers of the `keep` best rates, in their order. Equal scores: the larger number, the higher rate."""
    ranked = sorted(range(len(scores)), key=lambda number: (scores[number], -number))
    return sorted(ranked[:keep])
