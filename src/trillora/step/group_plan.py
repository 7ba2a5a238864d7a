"""How many adapters of a group are trained at which steps, known before training.

    >>> segments([100, 100, 200], [])
    [Segment(num_adapters=3, num_steps=100), Segment(num_adapters=1, num_steps=100)]
    >>> selections(1000)
    [Selection(step=15, keep=4), Selection(step=30, keep=2), Selection(step=60, keep=1)]

In the search for a learning rate, the worse rates are dropped at these selections until one is left. The winner is not
started again: it has been a whole run with its rate from the first step on. The rates are judged by their training
losses: they see the same rows, so the losses can be compared pair by pair, and they cost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

FRACTIONS = ((0.015, 4), (0.03, 2), (0.06, 1))  # of all steps, and how many rates are left then
FEWEST_STEPS = 4  # before the first selection


@dataclass(frozen=True)
class Selection:
    """After `step` steps the best `keep` adapters continue."""

    step: int
    keep: int


@dataclass(frozen=True)
class Segment:
    """Consecutive steps with the same number of adapters."""

    num_adapters: int
    num_steps: int


def selections(num_steps: int) -> list[Selection]:
    """When rates are dropped in a run of `num_steps` steps, and how many are left."""
    found: dict[int, Selection] = {}
    for fraction, keep in FRACTIONS:
        step = min(max(round(fraction * num_steps), FEWEST_STEPS), num_steps)
        found[step] = Selection(step, keep)
    return list(found.values())


def segments(num_steps: Sequence[int], picks: Sequence[Selection]) -> list[Segment]:
    """The course of a run in which every adapter trains to its planned end."""
    ends = sorted({*num_steps, *(pick.step for pick in picks)})
    found, start = [], 0
    for end in ends:
        left = sum(1 for steps in num_steps if steps > start)
        kept = [pick.keep for pick in picks if pick.step <= start]
        found.append(Segment(min([left, *kept]), end - start))
        start = end
    return found


def planned_widths(num_steps: Sequence[int], picks: Sequence[Selection], at_once: int, multiple: int) -> list[int]:
    """The numbers of adapters that the step is compiled for in addition to `at_once`. Each is a multiple of `multiple`,
    the size of the mesh's adapter axis.

    >>> planned_widths([100, 100, 200, 400], [], at_once=4, multiple=1)
    [2, 1]
    """
    counts = {segment.num_adapters for segment in segments(num_steps, picks)}
    widths = {-(-count // multiple) * multiple for count in counts}
    return sorted((width for width in widths if width < at_once), reverse=True)


def halvings(count: int, multiple: int) -> list[int]:
    """The numbers of adapters to try at once, the largest first."""
    sizes = [-(-count // (multiple * 2**k)) * multiple for k in range(count.bit_length())]
    return list(dict.fromkeys(sizes))


def score(losses: Sequence[float | None]) -> float:
    """What a rate is judged by: the mean loss of the last half of its steps since the last selection. None is a loss
    that was not finite."""
    recent = [math.inf if loss is None else loss for loss in losses[len(losses) // 2 :]]
    return sum(recent) / len(recent) if recent else math.inf


def best(scores: Sequence[float], keep: int) -> list[int]:
    """The numbers of the `keep` best rates, in their order. Of equal scores the higher rate is better."""
    ranked = sorted(range(len(scores)), key=lambda number: (scores[number], -number))
    return sorted(ranked[:keep])
