"""Detects divergence from the losses of the steps. Its state is part of a checkpoint, so resuming changes nothing.

    monitor = DivergenceMonitor(math.log(vocabulary_size))
    monitor.observe(step, loss, grad_norm, skipped)
    monitor.num_bad                                         # bad steps in a row

A loss is judged by what is usual in this run, because easy and hard rows can be far apart: an answer that is known by
heart has a loss of 0, a random key one of 4. Rows are shuffled, so a healthy model meets both at any time, and ten
losses in a row that are higher than nearly all usual ones are no coincidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WORSE_THAN_GUESSING = 1.5  # times the loss of guessing: no useful model reaches it by chance
FALLEN_BACK = 3.0  # above the usual losses: twenty times the perplexity
WINDOW = 100  # losses that show what is usual
NUM_FIRST = 10  # losses after which that is known well enough
USUAL = 0.95  # fraction of the window that counts as usual
LEARNED = 0.01  # with a loss below this the gradient may be zero: there is nothing left to learn


@dataclass
class DivergenceMonitor:
    """Counts bad steps in a row. A step is bad if it was skipped, if its loss is absurd, or if its gradient is zero: a
    huge adapter saturates the model's norms, and nothing it does changes the loss any more."""

    guessing: float  # loss of uniform guessing: the logarithm of the vocabulary size
    bad: dict[str, int] = field(default_factory=dict)  # bad steps in a row, by reason
    first_bad: int | None = None  # first step of that row
    first_loss: float | None = None  # of the stage: what its loss is before it learned anything
    recent: list[float] = field(default_factory=list)  # the latest losses, without `doubtful`
    doubtful: list[float] = field(default_factory=list)  # losses of the bad steps in a row
    lowest: float | None = None  # mean of the window in which the run did best
    usual: float | None = None  # nearly all losses of that window are below it

    @property
    def num_bad(self) -> int:
        return sum(self.bad.values())

    @property
    def limit(self) -> float:
        """Losses above it are absurd."""
        absurd = WORSE_THAN_GUESSING * max(self.guessing, self.first_loss or 0.0)
        if self.usual is None or len(self.recent) < NUM_FIRST:
            return absurd
        return min(absurd, self.usual + FALLEN_BACK)

    def observe(self, step: int, loss: float, grad_norm: float, skipped: bool) -> None:
        """Add a step. Steps count from 1; a step's loss belongs to the state before it."""
        if self.first_loss is None and math.isfinite(loss):
            self.first_loss = loss
        if reason := self._why_bad(loss, grad_norm, skipped):
            self.first_bad = step if not self.bad else self.first_bad
            self.bad[reason] = self.bad.get(reason, 0) + 1
            self.doubtful += [loss] if math.isfinite(loss) else []
            return
        # The run is well, so the high losses before this one came from hard rows.
        self._learn([*self.doubtful, loss])
        self.bad, self.first_bad, self.doubtful = {}, None, []

    def _why_bad(self, loss: float, grad_norm: float, skipped: bool) -> str | None:
        if skipped or not math.isfinite(loss):
            return "skipped"
        if loss > self.limit:
            return "with a loss worse than guessing" if loss > self.guessing else "with a loss far above the usual ones"
        return "without a gradient" if grad_norm == 0 and loss > LEARNED else None

    def _learn(self, losses: Sequence[float]) -> None:
        """Usual are the losses of the window with the lowest mean: if the losses rise slowly, it does not rise with
        them. The first full window replaces shorter ones, whose mean may be low by chance."""
        fills_window = len(self.recent) < WINDOW <= len(self.recent) + len(losses)
        self.recent = [*self.recent, *losses][-WINDOW:]
        mean = sum(self.recent) / len(self.recent)
        if self.lowest is None or mean < self.lowest or fills_window or len(self.recent) <= NUM_FIRST:
            self.lowest = mean
            self.usual = sorted(self.recent)[math.ceil(USUAL * (len(self.recent) - 1))]

    def new_stage(self) -> None:
        """Forget the losses: losses on other data, or of another kind, are not comparable. IPO begins at 25."""
        self.first_loss, self.recent, self.doubtful, self.lowest, self.usual = None, [], [], None, None

    def __str__(self) -> str:
        """The bad steps in a row: "3 skipped, 1 without a gradient"."""
        return ", ".join(f"{number} {reason}" for reason, number in self.bad.items())
