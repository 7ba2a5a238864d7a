"""Is the run still learning? Told step by step from the losses, the same way however often it was interrupted."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

WORSE_THAN_GUESSING = 1.5  # times the loss of guessing: no use is that bad by chance
FALLEN_BACK = 3.0  # above the lowest the smoothed loss has been: perplexity twenty times what it was
SMOOTHING = 0.1


@dataclass
class Health:
    """A step is bad if it was skipped, if its loss is absurd, or if nothing the adapter does changes the loss any more,
    as behind norms that a huge adapter saturates; many in a row are a run that is lost."""

    guessing: float  # loss of a model that knows nothing: the logarithm of the vocabulary
    num_bad: int = 0  # in a row
    first_bad: int | None = None  # of these
    smooth: float | None = None
    lowest: float = math.inf

    def see(self, step: int, loss: float, grad_norm: float, skipped: bool) -> None:
        """Steps count from 1; a step's loss is that of the state before it."""
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
        """Other data has another loss."""
        self.smooth, self.lowest = None, math.inf

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "lowest": None if math.isinf(self.lowest) else self.lowest}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Health:
        lowest = values["lowest"]
        return cls(**{**values, "lowest": math.inf if lowest is None else lowest})
