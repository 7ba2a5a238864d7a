"""What a run says while it goes: small facts, handed to a listener that prints, draws or stores them.

The parts that work know these and nothing of terminals; `console` shows them to people, `to_json` to programs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Step:
    """One optimiser step, after it happened."""

    step: int  # 1 is the first
    num_steps: int
    loss: float  # mean over the supervised tokens of the whole batch
    learning_rate: float
    grad_norm: float  # before clipping
    tokens_per_second: float
    seconds: float  # since the run started


Event = Note | Chosen | Progress | Step
Listener = Callable[[Event], None]


def print_nothing(event: Event) -> None:
    """The listener of those who do not listen."""


def to_json(event: Event) -> str:
    """One line of JSON: the event's kind, then its fields. NaN and infinity, unknown to JSON, become words."""
    fields = {name: _plain(value) for name, value in dataclasses.asdict(event).items()}
    return json.dumps({"event": type(event).__name__.lower(), **fields}, allow_nan=False, default=str)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
