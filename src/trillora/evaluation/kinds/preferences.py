"""Rows of preferences: how likely base and adapter find the two answers of a pair, or an answer with a label.

Each answer is a document of its own, with the prompt. Example, the log-probabilities of a pair in nats:

               chosen   rejected
    base        -14.0      -12.5
    adapter     -15.1      -19.0
    log-ratio    -1.1       -6.5

The base finds the rejected answer more likely, the adapter the chosen one: `pair_accuracy` counts this. A log-ratio is
the adapter's log-probability minus the base's, as in a reward of DPO without beta. The chosen answer has the higher one
here (`reward_accuracy`), by 5.4 (`reward_margin`). Equal values count half.

Legend: N rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trillora.data.documents import Documents
from trillora.data.tokenizing.encode import TokenizedDocument
from trillora.evaluation.bootstrap import Difference, Floats, Sums, shares
from trillora.evaluation.kinds.answers import NUM_EXAMPLES, token_sums, without_stop
from trillora.evaluation.likelihood import DocumentScores
from trillora.evaluation.result import Example, Interval
from trillora.events import share_interval
from trillora.generation.prompts import Prompts

CHOSEN, REJECTED = "chosen", "rejected"
REWARDS = ("reward_accuracy", "reward_margin")  # of the adapter, against the base
COIN_TOSS = 0.5


@dataclass(frozen=True)
class Compared:
    """The rows, and what one model finds about each answer, in the order of `documents.answers_alone`."""

    documents: Documents
    found: DocumentScores

    def side(self, number: int) -> DocumentScores:
        """The chosen answers of all pairs, or the rejected ones."""
        parts = self.found.loss_N, self.found.num_correct_N, self.found.num_tokens_N
        return DocumentScores(*(part[number::2] for part in parts))

    @property
    def log_probs(self) -> tuple[Floats, Floats]:
        return -self.side(0).loss_N, -self.side(1).loss_N

    @property
    def sums(self) -> dict[str, Sums]:
        """The metrics of this model alone. Loss and accuracy are about chosen and good answers."""
        are_pairs, weights_N = self.documents.are_pairs, np.maximum(self.documents.weights_N, 0)
        wanted = self.side(0) if are_pairs else self.found
        parts = wanted.loss_N, wanted.num_correct_N, wanted.num_tokens_N
        scores = DocumentScores(*(weights_N * part for part in parts))
        sums = token_sums(scores, self.documents) if weights_N.any() else {}
        if not are_pairs:
            return sums
        chosen, rejected = self.log_probs
        per_token = chosen / self.side(0).num_tokens_N - rejected / self.side(1).num_tokens_N
        return sums | {
            "pair_accuracy": shares(_are_right(chosen - rejected)),
            "pair_accuracy_norm": shares(_are_right(per_token)),
        }

    def rewards(self, base: Compared) -> dict[str, Sums]:
        """The metrics of the log-ratios to the base."""
        if self.documents.are_pairs:
            chosen, rejected = (own - other for own, other in zip(self.log_probs, base.log_probs, strict=True))
            margin = chosen - rejected
            return dict(zip(REWARDS, (shares(_are_right(margin)), shares(margin)), strict=True))
        ratio, is_good = base.found.loss_N - self.found.loss_N, self.documents.weights_N > 0
        sums = {REWARDS[0]: shares(_are_right(np.where(is_good, ratio, -ratio)))}
        if is_good.any() and not is_good.all():
            parts = np.stack([is_good * ratio, is_good, ~is_good * ratio, ~is_good], axis=1)
            sums[REWARDS[1]] = Sums(parts, _difference_of_means)
        return sums


def with_rewards(compared: Mapping[str, Compared]) -> dict[str, dict[str, Sums]]:
    """The metrics of each model, and of the base compared with itself, which finds both answers equal."""
    sums = {which: one.sums for which, one in compared.items()}
    if "base" in compared:
        sums = {which: found | compared[which].rewards(compared["base"]) for which, found in sums.items()}
    return sums


def intervals_of(found: Mapping[str, Difference], adapter: Mapping[str, Sums]) -> dict[str, Interval]:
    """The interval of a share that may be 100 % is Wilson's: drawn rows would all be right."""
    intervals = {name: difference.interval() for name, difference in found.items()}
    name = REWARDS[0]
    if name in intervals:
        right = adapter[name]
        low, high = (bound - COIN_TOSS for bound in share_interval(right.value, len(right.values_NK)))
        intervals[name] = Interval(right.value - COIN_TOSS, low, high, low > 0 or high < 0)
    return intervals


def examples(documents: Documents, compared: Mapping[str, Compared], prompts: Prompts) -> tuple[Example, ...]:
    """The first pairs, and which answer base and adapter find more likely."""
    log_probs = {which: one.log_probs for which, one in compared.items()}
    shown = []
    for number in range(min(NUM_EXAMPLES, len(documents))):
        sides = documents[number].parts
        answers = [_answer(side, prompts) for side in sides]
        values = {which: (float(chosen[number]), float(other[number])) for which, (chosen, other) in log_probs.items()}
        said = {which: answers[0] if chosen >= other else answers[1] for which, (chosen, other) in values.items()}
        scores = {
            which: {CHOSEN: round(chosen, 4), REJECTED: round(other, 4)} for which, (chosen, other) in values.items()
        }
        question = prompts.shown_question(sides[0].tokens[: sides[0].prompt].tolist())
        shown.append(Example(question, answers[0], said.get("base"), said["adapter"], scores))
    return tuple(shown)


def _answer(side: TokenizedDocument, prompts: Prompts) -> str:
    """The text after the prompt, until the last trained token."""
    end = int(np.flatnonzero(side.supervised)[-1]) + 1
    return prompts.decode(without_stop(side.tokens[side.prompt : end].tolist(), prompts.stops))


def _are_right(margins_N: Floats) -> Sequence[float]:
    return ((margins_N > 0) + 0.5 * (margins_N == 0)).tolist()


def _difference_of_means(sums_RK: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums_RK[:, 0] / sums_RK[:, 1] - sums_RK[:, 2] / sums_RK[:, 3]
