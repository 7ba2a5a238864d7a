"""Detects divergence from the losses of the steps. Its state is part of a checkpoint, so resuming changes nothing."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

WORSE_THAN_GUESSING = 1.5  # times the loss of guessing: no useful model reaches it by chance
FALLEN_BACK = 3.0  # above the lowest smoothed loss: twenty times the perplexity
SMOOTHING = 0.1  # weight of the newest loss in the moving average


@dataclass
class DivergenceMonitor:
    """Counts bad steps in a row. A step is bad if it was skipped, if its loss is absurd, or if its gradient is zero: a
    huge adapter saturates the model's norms, and nothing it does changes the loss any more."""

    guessing: float  # loss of uniform guessing: the logarithm of the vocabulary size
    num_bad: int = 0  # in a row
    first_bad: int | None = None  # first step of that row
    smooth: float | None = None  # moving average of the loss
    lowest: float = math.inf  # of the moving average

    def observe(self, step: int, loss: float, grad_norm: float, skipped: bool) -> None:
        """Add a step. Steps count from 1; a step's loss is that of the state before it."""
        if skipped or grad_norm == 0 or self._is_absurd(loss):
            self.first_bad = step if self.num_bad == 0 else self.first_bad
            self.num_bad += 1
            return
        self.num_bad, self.first_bad = 0, None
        self.smooth = loss if self.smooth is None else self.smooth + SMOOTHING * (loss - self.smooth)
        self.lowest = min(self.lowest, self.smooth)

    def _is_absurd(self, loss: float) -> bool:
        limit = min(WORSE_THAN_GUESSING * self.guessing, self.lowest + FALLEN_BACK)
        return not loss <= limit  # NaN is absurd too

    def new_stage(self) -> None:
        """Forget the losses: those of other data are not comparable."""
        self.smooth, self.lowest = None, math.inf

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lowest": None if math.isinf(self.lowest) else self.lowest}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> DivergenceMonitor:
        lowest = values["lowest"]
        return cls(**{**values, "lowest": math.inf if lowest is None else lowest})
