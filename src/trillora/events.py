"""What a run reports while it works: small dataclasses, passed to a listener that prints, draws or stores them.

    listener(Note("Model smollm2"))
    listener(Step(step=1, num_steps=100, stage="chat", loss=2.31, ...))

The working parts know these events and nothing about terminals: `report.console` shows them to people, `to_json` to
programs. Events of the types in `METRICS` are also the lines of `metrics.jsonl`: these dataclasses are the only
declaration of its fields, for the run that writes the file and for the report that reads it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Note:
    """A message to read once."""

    text: str


@dataclass(frozen=True)
class Chosen:
    """A recipe value that was chosen automatically, and why."""

    path: str  # dotted, as in the recipe: "train.micro_batch_size"
    value: Any
    reason: str


@dataclass(frozen=True)
class Progress:
    """How much of a piece of work is done."""

    label: str
    done: int
    total: int
    unit: Literal["", "bytes"] = ""


@dataclass(frozen=True)
class Alarm:
    """A failure that did not stop the run."""

    text: str


SWAPPED_SHARE = 0.4  # of held-out pairs that may be right, with the interval, before they look swapped; chance is half
SWAPPED = (
    "Training prefers the rejected answer in most held-out pairs: chosen and rejected may be swapped, in the training "
    "rows or in the held-out ones."
)


def share_interval(share: float, count: float) -> tuple[float, float]:
    """The middle 95 % of a share of `count` things, by Wilson's formula, which needs nothing else."""
    z, n = 1.96, max(count, 1.0)
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(max(share * (1 - share) / n + z * z / (4 * n * n), 0.0)) / (1 + z * z / n)
    return max(middle - half, 0.0), min(middle + half, 1.0)


@dataclass(frozen=True)
class Preferences:
    """Means over pairs of answers, or over answers with a label. A reward is beta times the log-probability of the
    answer, minus the reference's if the loss has one. `as_logged` has TRL's names."""

    pairs: float  # their number, or the sum of their weights
    rewards_chosen: float
    rewards_rejected: float
    rewards_margins: float
    rewards_accuracies: float  # share of the pairs in which the chosen answer has the higher reward
    logps_chosen: float  # log-probability of a whole answer; of simpo and orpo, the mean over its tokens
    logps_rejected: float
    kl: float | None = None  # of KTO

    @property
    def interval(self) -> tuple[float, float]:
        """Of the share of right pairs."""
        return share_interval(self.rewards_accuracies, self.pairs)

    @property
    def seem_swapped(self) -> bool:
        """Whether training made clearly more pairs wrong than right, of pairs that it did not see."""
        return self.interval[1] < SWAPPED_SHARE and self.rewards_margins < 0

    @classmethod
    def of(cls, means: Mapping[str, float]) -> Preferences | None:
        """From TRL's names; None without any."""
        return cls(**{name.replace("/", "_"): value for name, value in means.items()}) if means else None

    def as_logged(self) -> dict[str, float]:
        values = {name.replace("_", "/", 1): value for name, value in vars(self).items()}
        return {name: value for name, value in values.items() if value is not None and name != "pairs"}


@dataclass(frozen=True)
class Step:
    """One completed optimizer step."""

    step: int  # the first step of the run is 1
    num_steps: int  # of all stages
    stage: str
    loss: float  # mean over the supervised tokens of the whole batch; of preferences, over its pairs or answers
    learning_rate: float
    grad_norm: float  # before clipping
    skipped: bool  # a value was not finite, or the gradient was an outlier: no weight was changed
    tokens_per_second: float  # all token positions of the batch, padding included
    seconds: float  # since this process started training
    seconds_left: float
    padding: float  # fraction of the batch's token positions
    memory_gib: float | None = None  # peak memory of a device; on a CPU, memory of this process
    peak_fraction: float | None = None  # of the devices' peak FLOP/s, where that is known
    num_tokens: int = 0  # supervised tokens of the batch
    preferences: Preferences | None = None


@dataclass(frozen=True)
class Skipped:
    """A step whose update was not applied, and the data rows of its batch."""

    step: int
    stage: str
    reason: str
    rows: tuple[str, ...]  # "file:line"

    @property
    def text(self) -> str:
        more = f" and {len(self.rows) - 3} more" if len(self.rows) > 3 else ""
        return f"Step {self.step} was skipped: {self.reason}. Rows in its batch: {', '.join(self.rows[:3])}{more}"


@dataclass(frozen=True)
class Evaluated:
    """Metrics on the fixed evaluation set after a step; step 0 is the base model. The perplexity of preferences is of
    the chosen answers."""

    step: int
    stage: str
    loss: float
    perplexity: float
    accuracy: float  # fraction of supervised tokens that the model ranks first; of preferences, of the pairs
    num_tokens: int
    is_best: bool
    preferences: Preferences | None = None


@dataclass(frozen=True)
class AdaptersStarted:
    """The adapters that a run trains together. Sent once by each process, before its first step and evaluation. From
    then on, `stage` of `Evaluated`, `Sampled` and `Skipped` is the name of an adapter."""

    kind: Literal["phases", "sweep", "auto"]
    adapters: tuple[str, ...]  # names, without those that ended before this process started


@dataclass(frozen=True)
class AdapterStep:
    """One optimizer step of one adapter, in a run that trains several together. `Step` then has their mean loss."""

    step: int  # of this adapter; the first is 1
    adapter: str  # name of the phase, or of the sweep's combination
    loss: float
    learning_rate: float
    grad_norm: float
    skipped: bool
    num_tokens: int


@dataclass(frozen=True)
class AdapterEnded:
    """An adapter of several that is not trained any further."""

    step: int  # its last one
    adapter: str
    status: Literal["finished", "stopped early", "dropped", "diverged"]
    reason: str


@dataclass(frozen=True)
class Score:
    """One adapter on the held-out rows of one phase."""

    adapter: str  # "base" for the base model, "merged" for the merged adapter
    phase: str
    loss: float
    accuracy: float  # fraction of supervised tokens that the model ranks first
    num_tokens: int


@dataclass(frozen=True)
class Scored:
    """Every adapter of a run on the held-out rows of every phase, at the end."""

    step: int
    rows: Literal["test", "validation"]
    scores: tuple[Score, ...]


@dataclass(frozen=True)
class Sample:
    """The model's answer to one fixed prompt."""

    prompt: str
    answer: str
    expected: str | None = None


@dataclass(frozen=True)
class Sampled:
    """Answers after a step; step 0 is the base model."""

    step: int
    stage: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Saved:
    """A checkpoint was written completely."""

    step: int
    where: str
    seconds: float  # spent writing, in the background


@dataclass(frozen=True)
class Recorded:
    """The run's files are complete up to a step: an evaluation is in them, or the end of the run. What is made from the
    files can be made now."""

    step: int


@dataclass(frozen=True)
class HistoryEntry:
    """A line of history.jsonl: what happened to the run as a whole. Not sent to listeners."""

    time: str  # ISO 8601
    event: str  # started, resumed, stopped, diverged, finished
    step: int | None
    reason: str
    machine: str


Metric = Step | Skipped | Evaluated | Sampled | AdapterStep | AdapterEnded | Scored
Event = Note | Alarm | Chosen | Progress | Saved | Recorded | AdaptersStarted | Metric
Listener = Callable[[Event], None]
QUIET_SECONDS = 2.0  # people see progress only for work that takes longer

# The `kind` of a line of metrics.jsonl. The names are part of the file format.
METRICS: dict[str, type[Metric]] = {
    "step": Step,
    "skipped": Skipped,
    "evaluation": Evaluated,
    "samples": Sampled,
    "adapter_step": AdapterStep,
    "adapter_ended": AdapterEnded,
    "scores": Scored,
}
_KINDS: dict[type[Event], str] = {event_type: kind for kind, event_type in METRICS.items()}


class StopTraining(Exception):
    """Raised by a listener: the run is saved after the next step and ends, and the same call continues it.

    Not sent to listeners.
    """


def ignore_events(event: Event) -> None:
    """A listener that does nothing."""


def to_json(event: Event) -> str:
    """One line of JSON: the name of the event, then its fields."""
    return _to_line({"event": type(event).__name__.lower()}, event)


def to_metrics_line(event: Event) -> str | None:
    """The event as a line of metrics.jsonl; None if it is not a metric."""
    kind = _KINDS.get(type(event))
    if kind is None:
        return None
    line = json.loads(_to_line({"kind": kind}, event))
    if line.get("preferences", 0) is None:
        del line["preferences"]  # most runs have none
    return json.dumps(line)


def _to_line(head: dict[str, str], event: Event) -> str:
    fields = {name: _plain(value) for name, value in dataclasses.asdict(event).items()}
    return json.dumps({**head, **fields}, allow_nan=False, default=str)


def _plain(value: object) -> Any:
    """JSON has no NaN and no infinity: they are written as the strings "nan" and "inf"."""
    match value:
        case dict():
            return {key: _plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [_plain(inner) for inner in value]
        case float() if not math.isfinite(value):
            return str(value)
    return value
