"""Which learning rates continue at a selection (`step.group_plan`).

The rates are judged by their training losses: they see the same rows, so the losses can be compared pair by pair, and
they cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def score(losses: Sequence[float]) -> float:
    """What a rate is judged by: the mean loss of the last half of its steps since the last selection."""
    recent = losses[len(losses) // 2 :]
    mean = sum(recent) / max(len(recent), 1)
    return mean if math.isfinite(mean) and recent else math.inf


def best(scores: Sequence[float], keep: int) -> list[int]:
    """The numbers of the `keep` best rates, in their order. Of equal scores the higher rate is better."""
    ranked = sorted(range(len(scores)), key=lambda number: (scores[number], -number))
    return sorted(ranked[:keep])
