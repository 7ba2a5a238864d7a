"""Loss, perplexity and accuracy over the trained tokens of a data set, summed batch by batch.

sums = TokenSums()
for batch in batches:
    sums.add(eval_step(adapter, base, batch))
sums.metrics()      # TokenMetrics(loss=1.21, perplexity=3.35, accuracy=0.71, num_tokens=4312)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TokenMetrics:
    loss: float  # mean cross-entropy per trained token, in nats
    perplexity: float
    accuracy: float  # fraction of trained tokens that were the most likely ones
    num_tokens: int


class TokenSums:
    """Running sums in float64, so that the order of the batches does not matter."""

    def __init__(self) -> None:
        self._loss = self._num_correct = self._num_tokens = 0.0

    def add(self, sums: Mapping[str, Any]) -> None:
        """Adds the result of one `eval_step`."""
        self._loss += float(sums["loss"])
        self._num_correct += float(sums["num_correct"])
        self._num_tokens += float(sums["num_tokens"])

    def metrics(self) -> TokenMetrics:
        loss = self._loss / self._num_tokens
        perplexity = math.exp(loss) if loss < 700 else loss * math.inf  # exp(710) overflows; NaN stays NaN
        return TokenMetrics(loss, perplexity, self._num_correct / self._num_tokens, round(self._num_tokens))
