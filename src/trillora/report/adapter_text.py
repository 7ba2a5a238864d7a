"""Runs that train several adapters together, as text: their events are collected, so that eight adapters are not eight
lines.

    Evaluated(50, "alpaca", 1.75, ...), Evaluated(50, "code", 1.55, ...)
    ->  evaluation at step 50  loss: alpaca 1.7500, code 1.5500
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rich.cells import cell_len

from trillora.events import (
    AdapterEnded,
    AdaptersStarted,
    AdapterStep,
    Alarm,
    Evaluated,
    Event,
    Sampled,
    Score,
    Scored,
    Skipped,
)
from trillora.report.event_text import at, in_one_line
from trillora.report.numbers import format_count
from trillora.safe_text import visible_line

MAX_SHOWN = 12  # adapters of one evaluation; of more, those with the lowest losses
MAX_NAME = 28  # characters of a name in a line
LISTED = 3  # names in a sentence
BEST, OWN, USUAL, FAINT = "bold green", "bold", "", "dim"  # styles in a terminal
GAP = "  "  # between the columns of a table

Cell = tuple[str, str]  # text and style


@dataclass
class Adapters:
    """The adapters of the run. There are none in a run that trains a single one."""

    active: dict[str, bool] = field(default_factory=dict)  # name -> whether it is still trained
    num_skipped: int = 0  # steps of all of them

    def __bool__(self) -> bool:
        return bool(self.active)

    def follow(self, event: Event) -> None:
        match event:
            case AdaptersStarted(adapters=names):
                self.active = dict.fromkeys(names, True)
            case AdapterStep(adapter=name):
                self.active.setdefault(name, True)
                self.num_skipped += event.skipped
            case AdapterEnded(adapter=name):
                self.active[name] = False

    @property
    def text(self) -> str:
        num_active, total = sum(self.active.values()), len(self.active)
        part = f"{num_active} of " if 0 < num_active < total else ""
        return f"{part}{format_count(total, 'adapter', 'adapters')}"


@dataclass(frozen=True)
class EvaluatedTogether:
    """The evaluations of several adapters after a step."""

    step: int
    evaluations: tuple[Evaluated, ...]

    @property
    def finite(self) -> list[Evaluated]:
        """From the lowest loss to the highest."""
        return sorted((e for e in self.evaluations if math.isfinite(e.loss)), key=lambda e: e.loss)


@dataclass(frozen=True)
class EndedTogether:
    """Adapters that ended at the same step in the same way. Those that diverged have the same reason too."""

    ended: AdapterEnded
    names: tuple[str, ...]

    @property
    def is_alarm(self) -> bool:
        return self.ended.status == "diverged"

    @property
    def text(self) -> str:
        verb = {"stopped early": "stopped early", "dropped": "was dropped"}.get(self.ended.status, self.ended.status)
        if len(self.names) > 1:
            verb = verb.replace("was ", "were ")
        reason = f": {self.ended.reason.rstrip('.')}" if self.ended.reason else ""
        return f"{_subject(self.names)} {verb} at step {self.ended.step}{reason}"


Shown = Event | EvaluatedTogether | EndedTogether


class Collector:
    """Passes events on. Those that each of several adapters sends are held until an event of the run as a whole, and
    then passed on together: evaluations, samples, skipped steps, ends."""

    def __init__(self, show: Callable[[Shown], None], adapters: Adapters) -> None:
        self._show = show
        self._adapters = adapters
        self._held: list[Evaluated | Sampled | Skipped | AdapterEnded] = []

    def add(self, event: Event) -> None:
        self._adapters.follow(event)
        match event:
            case AdaptersStarted() | AdapterStep():
                pass  # `Step` has what is shown
            case Evaluated() | Sampled() | Skipped() | AdapterEnded() if self._adapters:
                if self._is_repeated(event):
                    self.flush()
                self._held.append(event)
            case _:
                self.flush()
                self._show(event)

    def flush(self) -> None:
        held, self._held = self._held, []
        if evaluations := tuple(event for event in held if isinstance(event, Evaluated)):
            self._show(EvaluatedTogether(max(event.step for event in evaluations), evaluations))
        if sampled := [event for event in held if isinstance(event, Sampled) and event.samples]:
            first_of_each = tuple(
                replace(event.samples[0], prompt=f"[{short_name(event.stage)}] {event.samples[0].prompt}")
                for event in sampled
            )
            self._show(Sampled(max(event.step for event in sampled), "", first_of_each))
        skipped = [event for event in held if isinstance(event, Skipped)]
        for _, alike in groupby(skipped, lambda event: (event.step, event.reason)):
            first, *others = alike
            self._show(Alarm(f"{_subject((first.stage, *(event.stage for event in others)))}: {first.text}"))
        ended = [event for event in held if isinstance(event, AdapterEnded)]
        for _, equal in groupby(ended, lambda e: (e.status, e.step, e.reason if e.status == "diverged" else "")):
            events = list(equal)
            reason = events[0].reason if len({event.reason for event in events}) == 1 else ""
            self._show(EndedTogether(replace(events[0], reason=reason), tuple(event.adapter for event in events)))

    def _is_repeated(self, event: Evaluated | Sampled | Skipped | AdapterEnded) -> bool:
        return isinstance(event, Evaluated) and any(
            isinstance(held, Evaluated) and held.stage == event.stage for held in self._held
        )


def short_name(name: str) -> str:
    return in_one_line(visible_line(name), MAX_NAME)


def _subject(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"Adapter {short_name(names[0])}"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} adapters ({', '.join(map(short_name, names[:LISTED]))}{more})"


# Evaluations


def evaluated_title(together: EvaluatedTogether) -> str:
    return f"evaluation {at(together.step)}"


def evaluated_items(together: EvaluatedTogether) -> list[tuple[str, str, bool]]:
    """(name, loss, is better than before) of each adapter, or of those with the lowest losses if there are many."""
    events = together.evaluations
    if len(events) > MAX_SHOWN:
        bad = [event for event in events if not math.isfinite(event.loss)]
        events = tuple([*together.finite, *bad][:MAX_SHOWN])
    return [(short_name(event.stage), f"{event.loss:.4f}", event.is_best or event.step == 0) for event in events]


def evaluated_rest(together: EvaluatedTogether) -> str:
    """What the items leave out, if they leave out anything."""
    num_hidden = len(together.evaluations) - MAX_SHOWN
    if num_hidden <= 0:
        return ""
    num_better = sum(event.is_best for event in together.evaluations)
    highest = f" up to {together.finite[-1].loss:.4f}" if together.finite else ""
    better = f", {num_better} of {len(together.evaluations)} better than before" if together.step else ""
    return f"and {num_hidden} more{highest}{better}"


def same_loss(together: EvaluatedTogether) -> str:
    """The base model's loss, if all adapters are evaluated on the same rows; otherwise nothing."""
    losses = {f"{event.loss:.4f}" for event in together.evaluations}
    is_same = together.step == 0 and len(losses) == 1 and len(together.evaluations) > 1
    return f"loss {losses.pop()} for all {len(together.evaluations)} adapters" if is_same else ""


def evaluated_line(together: EvaluatedTogether) -> str:
    if same := same_loss(together):
        return f"{evaluated_title(together)}  {same}"
    items = [
        f"{name} {loss}{'' if is_better else ' (not better)'}" for name, loss, is_better in evaluated_items(together)
    ]
    rest = evaluated_rest(together)
    return f"{evaluated_title(together)}  loss: {', '.join([*items, *([rest] if rest else [])])}"


# Scores


def scores_title(scored: Scored) -> str:
    return f"loss and accuracy on the {scored.rows} rows; [ ] own adapter, * lowest of a phase"


def scores_table(scored: Scored, max_width: int) -> list[list[Cell]]:
    """Lines of padded cells: a row per adapter and a column per phase. If that is too wide, a row per phase."""
    lines = _padded(_matrix(scored))
    if sum(cell_len(text) + len(GAP) for text, _ in lines[0]) > max_width:
        lines = _padded(_by_phase(scored))
    return lines


def _matrix(scored: Scored) -> list[list[Cell]]:
    found, phases, lowest = _indexed(scored)
    adapters = list(dict.fromkeys(score.adapter for score in scored.scores))
    head = [("", FAINT), *((f"{short_name(phase)}  ", FAINT) for phase in phases)]
    rows = [
        [(short_name(adapter), OWN), *(_cell(found.get((adapter, phase)), lowest.get(phase)) for phase in phases)]
        for adapter in adapters
    ]
    return [head, *rows]


def _by_phase(scored: Scored) -> list[list[Cell]]:
    found, phases, lowest = _indexed(scored)
    head = [("", FAINT), *((f"{name}  ", FAINT) for name in ("base", "own", "merged", "lowest"))]
    rows = []
    for phase in phases:
        three = [_cell(found.get((name, phase)), lowest.get(phase)) for name in ("base", phase, "merged")]
        best = lowest.get(phase)
        rows.append([(short_name(phase), OWN), *three, (short_name(best.adapter) if best else "", FAINT)])
    return [head, *rows]


def _indexed(scored: Scored) -> tuple[dict[tuple[str, str], Score], list[str], dict[str, Score]]:
    """The scores by adapter and phase, the phases, and the score with the lowest loss of each phase."""
    found = {(score.adapter, score.phase): score for score in scored.scores}
    lowest: dict[str, Score] = {}
    for score in found.values():
        if math.isfinite(score.loss) and (score.phase not in lowest or score.loss < lowest[score.phase].loss):
            lowest[score.phase] = score
    return found, list(dict.fromkeys(score.phase for score in scored.scores)), lowest


def _cell(score: Score | None, lowest: Score | None) -> Cell:
    if score is None:
        return "", USUAL
    is_own, is_best = score.adapter == score.phase, score == lowest
    start, end = "[]" if is_own else "  "
    text = f"{start}{score.loss:.3f} {score.accuracy:>5.1%}{end}{'*' if is_best else ' '}"
    return text, BEST if is_best else OWN if is_own else USUAL


def _padded(rows: list[list[Cell]]) -> list[list[Cell]]:
    """Every column gets the width of its longest cell. The first is aligned left, the others right."""
    widths = [max(cell_len(text) for text, _ in column) for column in zip(*rows, strict=True)]
    return [
        [
            (
                f"{text}{' ' * (width - cell_len(text))}" if place == 0 else f"{' ' * (width - cell_len(text))}{text}",
                style,
            )
            for place, ((text, style), width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
