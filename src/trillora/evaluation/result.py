"""The result of an evaluation, as it is returned, shown and written to `eval.json`.

The keys of version 1 (data, num_rows, base, adapter, majority, examples) still mean the same. With several files they
are about all of them: base and adapter are the means over the files, and `files` has each file's own result.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal

from trillora.evaluation.scores import Scores

VERSION = 2
# What the rows expect: answers of some form, choices, pairs of answers, or answers with a label.
Kind = Literal["json", "short", "long", "choices", "pairs", "labels", "none", "mixed"]

LABELS = {
    "loss": "loss",
    "perplexity": "perplexity",
    "accuracy": "token accuracy",
    "exact_match": "exact match",
    "f1": "F1",
    "chrf": "chrF",
    "bleu": "BLEU",
    "rouge_1": "ROUGE-1",
    "rouge_2": "ROUGE-2",
    "rouge_l": "ROUGE-L",
    "valid_json": "valid JSON",
    "right_fields": "right fields",
    "choice_accuracy": "choice",
    "choice_accuracy_norm": "choice, per token",
    "pair_accuracy": "pair accuracy",
    "pair_accuracy_norm": "pairs, per token",
    "reward_accuracy": "reward accuracy",
    "reward_margin": "reward margin",
}
_JSON = ("exact_match", "valid_json", "right_fields")
_TEXT = ("chrf", "bleu", "rouge_1", "rouge_2", "rouge_l")
_CHOICES = ("choice_accuracy", "choice_accuracy_norm")
_REWARDS = ("reward_accuracy", "reward_margin")
_PAIRS = ("pair_accuracy", "pair_accuracy_norm", *_REWARDS)
_OF_KIND: dict[str, tuple[str, ...]] = {
    "json": _JSON,
    "short": ("exact_match", "f1"),
    "long": _TEXT,
    "choices": _CHOICES,
    "pairs": _PAIRS,
    "labels": _REWARDS,
    "none": (),
    "mixed": ("exact_match", "f1", *_TEXT, *_JSON[1:], *_CHOICES, *_PAIRS),
}
LESS_IS_BETTER = ("loss", "perplexity")
NOT_SHARES = (*LESS_IS_BETTER, "reward_margin")  # the others are between 0 and 1
GUESSED = (*_CHOICES, *_PAIRS[:3])  # `Evaluation.chance` is about these


def shown_metrics(kind: str) -> tuple[str, ...]:
    """The metrics that say something about such answers, in the order of tables."""
    return (*LESS_IS_BETTER, "accuracy", *_OF_KIND.get(kind, _JSON))


@dataclass(frozen=True)
class Interval:
    """The adapter's score minus the base's, with its 95 % interval. The base compared with itself has a reward accuracy
    of a half and a margin of 0."""

    difference: float
    low: float
    high: float
    beyond_chance: bool  # 0 is not in the interval


@dataclass(frozen=True)
class Example:
    """One prompt with its answers, for display."""

    prompt: str
    expected: str
    base: str | None
    adapter: str
    # Of base and adapter, by metric; of a pair the log-probabilities of both answers: chosen and rejected.
    scores: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Forgetting:
    """What the adapter cost on general questions and texts (`forgetting`)."""

    base_accuracy: float
    adapter_accuracy: float
    forgetting: float  # accuracy lost: base minus adapter, at least 0
    kl: float  # mean KL(base || adapter) of the next token on general texts, in nats
    num_questions: int
    num_tokens: int
    interval: Interval  # of the accuracy, adapter minus base


@dataclass(frozen=True)
class Needle:
    """Facts that were found in long texts (`kinds.needle`)."""

    lengths: tuple[int, ...]  # of prompt and answer, in tokens
    depths: tuple[float, ...]  # of the fact in the text; 0 is its beginning
    num_facts: int  # asked for at each length and depth
    base: tuple[tuple[float, ...], ...] | None  # share of the facts that were found, by length and depth
    adapter: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Condition:
    """A condition of `--gate`."""

    condition: str
    value: float | None  # None: nothing to measure
    met: bool


@dataclass(frozen=True)
class Evaluation:
    """The result of a test."""

    data: str
    num_rows: int
    base: Scores | None
    adapter: Scores
    majority: dict[str, float]  # fraction of the most common value of each JSON field
    examples: tuple[Example, ...]
    label: str = ""  # the short name of the file
    kind: Kind = "json"
    chance: float | None = None  # accuracy of guessing: of choices and of pairs
    intervals: dict[str, Interval] = field(default_factory=dict)  # by metric; fields.NAME for a JSON field
    files: tuple[Evaluation, ...] = ()  # if there are several
    forgetting: Forgetting | None = None
    needle: Needle | None = None
    gate: tuple[Condition, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return all(condition.met for condition in self.gate)

    def to_dict(self) -> dict[str, Any]:
        """The content of `eval.json`. NaN and infinity, which JSON does not have, become text."""
        return {"version": VERSION, **_json_values(dataclasses.asdict(self))}


def _json_values(value: object) -> Any:
    match value:
        case dict():
            return {name: _json_values(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_json_values(inner) for inner in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value
