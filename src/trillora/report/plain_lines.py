"""A run as plain lines: for a log file, and fewer of them for a notebook cell, which cannot move the cursor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from trillora.events import Alarm, Chosen, Evaluated, Note, Progress, Sampled, Saved, Scored, Skipped, Step
from trillora.report.adapter_text import (
    GAP,
    Adapters,
    EndedTogether,
    EvaluatedTogether,
    Shown,
    evaluated_line,
    scores_table,
    scores_title,
)
from trillora.report.event_text import (
    amount_of,
    at,
    chosen_line,
    evaluation_line,
    in_one_line,
    sample_lines,
    saved_line,
    step_line,
)
from trillora.safe_text import visible

LOGGED_PARTS = 10  # progress lines of one piece of work in a log
SAMPLE_CHARACTERS = 240  # of a prompt or an answer
MAX_WIDTH = 160  # columns of a table

Frequent = Step | Evaluated | EvaluatedTogether | Sampled | Saved  # a long run has many of these


@dataclass(frozen=True)
class LineLimits:
    """Approximate number of lines of each kind in a long run."""

    first_steps: int
    steps: int
    evaluations: int
    samples: int
    saves: int
    parts: int  # of the progress of one piece of work


LOG = LineLimits(first_steps=10, steps=100, evaluations=100, samples=100, saves=100, parts=LOGGED_PARTS)
NOTEBOOK = LineLimits(first_steps=1, steps=20, evaluations=8, samples=2, saves=3, parts=2)


class PlainLines:
    """Prints events as lines of text. In a long run it holds most of them back, and prints the latest held one of each
    kind before a message and at the end."""

    def __init__(self, file: IO[str], limits: LineLimits, adapters: Adapters, every_steps: int | None = None) -> None:
        """`every_steps` replaces the limit on lines of steps."""
        self._file = file
        self._limits = limits
        self._every_steps = every_steps
        self._adapters = adapters
        self._num_steps = 0
        self._num_skipped = 0
        self._stage: str | None = None
        self._printed: dict[type[Frequent], int] = {}  # kind -> step of the last printed event
        self._held: dict[type[Frequent], Frequent] = {}  # kind -> latest event that was not printed
        self._parts: dict[str, tuple[int, str]] = {}  # label of unfinished work -> last printed part and line

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._print_held()

    def show(self, event: Shown) -> None:
        match event:
            case Note(text):
                self._print_held()
                self._print(text)
            case Alarm(text=text) | Skipped(text=text):
                self._print_held()
                self._print(f"alarm: {text}")
            case Chosen():
                self._print(chosen_line(event))
            case Progress():
                self._show_progress(event)
            case EndedTogether():
                self._print_held()
                self._print(f"{'alarm: ' if event.is_alarm else ''}{event.text}")
            case Scored(scores=scores) if scores:
                self._print_held()
                self._print(scores_title(event))
                for line in scores_table(event, MAX_WIDTH):
                    self._print(f"  {GAP.join(text for text, _ in line)}".rstrip())
            case Step() | Evaluated() | EvaluatedTogether() | Sampled() | Saved():
                if isinstance(event, Step):
                    self._follow(event)
                self._held.pop(type(event), None)
                if self._is_due(event):
                    self._print_event(event)
                else:
                    self._held[type(event)] = event

    def _follow(self, step: Step) -> None:
        self._num_skipped += step.skipped and not self._adapters
        self._num_steps = step.num_steps
        if step.stage != self._stage and self._stage is not None:
            self._print_held()
            self._print(f"stage {step.stage} starts")
        self._stage = step.stage

    def _is_due(self, event: Frequent) -> bool:
        if type(event) not in self._printed:
            return True
        if isinstance(event, Step):
            is_first = self._every_steps is None and event.step <= self._limits.first_steps
            every = self._every_steps or max(1, event.num_steps // self._limits.steps)
            return is_first or event.step % every == 0 or event.step == event.num_steps
        limits = self._limits
        lines = {Sampled: limits.samples, Saved: limits.saves}.get(type(event), limits.evaluations)
        return event.step - self._printed[type(event)] >= self._num_steps // lines

    def _print_event(self, event: Frequent) -> None:
        self._printed[type(event)] = event.step
        match event:
            case Step():
                adapters = self._adapters.text if self._adapters else ""
                self._print(step_line(event, self._num_skipped + self._adapters.num_skipped, adapters))
            case Evaluated():
                self._print(evaluation_line(event))
            case EvaluatedTogether():
                self._print(evaluated_line(event))
            case Saved():
                self._print(saved_line(event))
            case Sampled():
                self._print(f"samples {at(event.step)}")
                for mark, text, _ in sample_lines(event, lambda text: in_one_line(text, SAMPLE_CHARACTERS)):
                    self._print(f"  {mark} {text}")

    def _print_held(self) -> None:
        for event in self._held.values():
            self._print_event(event)
        self._held.clear()

    def _show_progress(self, work: Progress) -> None:
        part, line = work.done * self._limits.parts // max(work.total, 1), f"{work.label}  {amount_of(work)}"
        last_part, last_line = self._parts.get(work.label, (-1, ""))
        if part != last_part and line != last_line:
            self._print(line)
            self._parts[work.label] = part, line
        if work.done >= work.total:
            self._parts.pop(work.label, None)

    def _print(self, line: str) -> None:
        self._file.write(visible(line) + "\n")
        self._file.flush()
