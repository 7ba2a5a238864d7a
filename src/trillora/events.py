"""What a run says while it goes: small facts, handed to a listener that prints, draws or stores them.

The parts that work know these and nothing of terminals; `console` shows them to people, `to_json` to programs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Note:
    """Something a person should read once."""

    text: str


@dataclass(frozen=True)
class Chosen:
    """A recipe value the machine chose, and why."""

    path: str  # dotted, as in the recipe: "train.micro_batch_size"
    value: Any
    reason: str


@dataclass(frozen=True)
class Progress:
    """How far a piece of work has come."""

    label: str
    done: int
    total: int
    unit: Literal["", "bytes"] = ""


@dataclass(frozen=True)
class Alarm:
    """Something that went wrong and did not stop the run."""

    text: str


@dataclass(frozen=True)
class Step:
    """One optimiser step, after it happened."""

    step: int  # 1 is the first of the run
    num_steps: int  # of all stages
    stage: str
    loss: float  # mean over the supervised tokens of the whole batch
    learning_rate: float
    grad_norm: float  # before clipping
    skipped: bool  # loss or gradient was not finite, or far out of line: nothing was changed
    tokens_per_second: float  # slots of the batch, padding included
    seconds: float  # since this process began to train
    seconds_left: float
    padding: float  # share of this batch's slots
    memory_gib: float | None = None  # most a device has held; of this process on a CPU
    peak_fraction: float | None = None  # of the chips' arithmetic, where it is known


@dataclass(frozen=True)
class Evaluated:
    """The fixed evaluation set after a step; step 0 is the base."""

    step: int
    stage: str
    loss: float
    perplexity: float
    accuracy: float  # share of trained tokens that were the likeliest
    num_tokens: int
    is_best: bool


@dataclass(frozen=True)
class Sample:
    """What the model says to one fixed prompt."""

    prompt: str
    answer: str
    expected: str | None = None


@dataclass(frozen=True)
class Sampled:
    """Answers after a step; step 0 is the base."""

    step: int
    stage: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True)
class Saved:
    """A checkpoint lies where it belongs, whole."""

    step: int
    where: str
    seconds: float  # spent writing, beside the training


Event = Note | Alarm | Chosen | Progress | Step | Evaluated | Sampled | Saved
Listener = Callable[[Event], None]


def ignore_events(event: Event) -> None:
    """The listener of those who do not listen."""


def to_json(event: Event) -> str:
    """One line of JSON: the event's kind, then its fields."""
    fields = {name: plain(value) for name, value in dataclasses.asdict(event).items()}
    return json.dumps({"event": type(event).__name__.lower(), **fields}, allow_nan=False, default=str)


def plain(value: Any) -> Any:
    """What JSON can hold: NaN and infinity, unknown to it, become words."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
