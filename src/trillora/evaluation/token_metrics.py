"""Loss, perplexity and accuracy over the trained tokens or the pairs of a data set, summed batch by batch.

sums = TokenSums()
for batch in batches:
    sums.add(eval_step(adapter, base, batch))
sums.metrics()      # TokenMetrics(loss=1.21, perplexity=3.35, accuracy=0.71, num_tokens=4312)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from trillora.events import Preferences


@dataclass(frozen=True)
class TokenMetrics:
    loss: float  # mean cross-entropy per trained token, in nats
    perplexity: float
    accuracy: float  # fraction of trained tokens that were the most likely ones; of preferences, of the pairs
    num_tokens: int
    preferences: Preferences | None = None


class RunningSums(Protocol):
    """Running sums in float64, so that the order of the batches does not matter."""

    def add(self, sums: Mapping[str, Any]) -> None:
        """Adds the result of one evaluation step."""

    def metrics(self) -> TokenMetrics: ...


class TokenSums:
    """Over trained tokens."""

    def __init__(self) -> None:
        self._loss = self._num_correct = self._num_tokens = 0.0

    def add(self, sums: Mapping[str, Any]) -> None:
        self._loss += float(sums["loss"])
        self._num_correct += float(sums["num_correct"])
        self._num_tokens += float(sums["num_tokens"])

    def metrics(self) -> TokenMetrics:
        loss = self._loss / self._num_tokens
        return TokenMetrics(loss, _perplexity(loss), self._num_correct / self._num_tokens, round(self._num_tokens))


class PreferenceSums:
    """Over pairs of answers, or answers with a label."""

    def __init__(self) -> None:
        self._sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))  # sum and weight

    def add(self, sums: Mapping[str, Any]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + np.asarray(value, np.float64)

    def metrics(self) -> TokenMetrics:
        sums = dict(self._sums)
        names = ("loss", "token_loss", "num_tokens", "num_wanted", "wanted_log_p")
        loss, token_loss, num_tokens, num_wanted, log_p = (float(sums.pop(name)[0]) for name in names)
        means = {name: float(total / weight) if weight else 0.0 for name, (total, weight) in sums.items()}
        pairs = float(sums["rewards/accuracies"][1])
        means |= {"rewards/margins": means["rewards/chosen"] - means["rewards/rejected"], "pairs": pairs}
        # All answers may be bad ones: then there is none to be certain of.
        mean = loss / pairs + (token_loss / num_wanted if num_wanted else 0.0)
        per_token = log_p / num_wanted if num_wanted else math.nan
        found = Preferences.of(means)
        return TokenMetrics(mean, _perplexity(-per_token), means["rewards/accuracies"], round(num_tokens), found)


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else loss * math.inf  # exp(710) overflows; NaN stays NaN
