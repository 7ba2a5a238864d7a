"""Shows a run in a terminal, in a notebook and in a log file.

A terminal gets a live panel at the bottom; lines worth keeping scroll above it. A log file gets one plain line per
event, thinned out in long runs. A notebook cell cannot move the cursor, so it gets plain lines too, but fewer. A log:

    Progress("Loading weights", 269_042_688, 538_060_288, "bytes")  ->  Loading weights  269 MB of 538 MB
    Evaluated(step=50, loss=1.75, ...)  ->  evaluation at step 50  loss 1.7500  perplexity 5.75  accuracy 61.2%  best

Closed output never stops a run. Untrusted text (rows, answers) is shown with control characters as escapes, and rich's
markup in it has no effect.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from trillora.evaluation.scores import is_right
from trillora.events import (
    QUIET_SECONDS,
    Alarm,
    Chosen,
    Evaluated,
    Event,
    Listener,
    Note,
    Progress,
    Sample,
    Sampled,
    Saved,
    Skipped,
    Step,
)
from trillora.report.numbers import format_bytes, format_duration
from trillora.report.output import closed_pipe_safe, guarded_output, masked, unguarded
from trillora.safe_text import visible, visible_line

if TYPE_CHECKING:
    from trillora.doctor import Finding

KEPT_STEPS = 20  # step lines that stay in a terminal
LOGGED_PARTS = 10  # progress lines of one piece of work in a log
REDRAW_SECONDS = 0.25
NUM_LOSSES = 32  # in the small loss curve of a wide panel
SHOWN_SAMPLES = 4  # per Sampled event
SAMPLE_CHARACTERS = 240  # of a prompt or an answer in a log
ANSWER_LINES = 2  # in a terminal
MAX_PANEL, MAX_BAR = 120, 80  # columns; wider ones are harder to read


class SafeConsole(Console):
    """A console whose text cannot control the terminal; the colors are ours. All consoles of Trillora are of this
    class. Text that takes part in a layout is made visible before that, because escapes change its width."""

    def __init__(self, *, stderr: bool = False) -> None:
        stream = unguarded(sys.stderr if stderr else sys.stdout)
        super().__init__(file=stream, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else visible(text), style, control)


@contextmanager
def console_listener(console: Console | None = None) -> Iterator[Listener]:
    """Yields a listener that shows events on the console. It never raises, and threads may share it."""
    console = console or SafeConsole()
    file = console.file
    console.file = closed_pipe_safe(file)
    view = _choose_view(console)
    lock = threading.RLock()
    slow = _SlowWork(view.show, lock)

    def listen(event: Event) -> None:
        event = masked(event)
        with lock:
            if isinstance(event, Progress):
                slow.update(event)
            else:
                view.show(event)

    try:
        with view.open():
            try:
                yield listen
            finally:
                slow.close()
    finally:
        console.file = file


class _SlowWork:
    """Passes on the progress of work once it has taken `QUIET_SECONDS` seconds. A timer shows work that is silent."""

    def __init__(self, show: Callable[[Progress], None], lock: threading.RLock) -> None:
        self._show = show
        self._lock = lock
        self._shown: set[str] = set()  # labels
        self._waiting: dict[str, tuple[threading.Timer, Progress]] = {}  # label -> its timer and latest progress

    def update(self, work: Progress) -> None:
        label, is_done = work.label, work.done >= work.total
        if label in self._shown:
            if is_done:
                self._shown.remove(label)
            self._show(work)
        elif label in self._waiting:
            timer, _ = self._waiting.pop(label)
            if is_done:
                timer.cancel()
            else:
                self._waiting[label] = timer, work
        elif not is_done:
            timer = threading.Timer(QUIET_SECONDS, self._show_late, (label,))
            timer.daemon = True
            self._waiting[label] = timer, work
            timer.start()

    def close(self) -> None:
        with self._lock:
            for timer, _ in self._waiting.values():
                timer.cancel()
            self._waiting.clear()

    def _show_late(self, label: str) -> None:
        with self._lock:
            if label in self._waiting:
                self._shown.add(label)
                self._show(self._waiting.pop(label)[1])


def show_findings(findings: Iterable[Finding], console: Console | None = None) -> None:
    """Prints the doctor's findings, each followed by its fix."""
    console = console or SafeConsole()
    looks = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "broken": ("broken ", "bold red")}
    for finding in findings:
        word, style = looks[finding.state]
        console.print(Text.assemble((word, style), f"  {finding.name:<15} {finding.what}"), soft_wrap=True)
        if finding.do:
            console.print(Text.assemble(" " * 25, ("do: ", "dim"), finding.do), soft_wrap=True)


# Events as text


def step_line(step: Step, num_skipped: int = 0) -> str:
    """One step; the columns of successive lines are aligned."""
    return (
        f"{_step_figures(step)}  {step.tokens_per_second:,.0f} tokens/s  left {format_duration(step.seconds_left)}"
        f"{_skipped(num_skipped)}"
    )


def chosen_line(chosen: Chosen) -> str:
    return f"{chosen.path} = {chosen.value}  ({chosen.reason})"


def evaluation_line(evaluated: Evaluated) -> str:
    return (
        f"evaluation {_at(evaluated.step)}  loss {evaluated.loss:.4f}  perplexity {evaluated.perplexity:.2f}  "
        f"accuracy {evaluated.accuracy:.1%}{'  best' if evaluated.is_best else ''}"
    )


def saved_line(saved: Saved) -> str:
    return f"saved step {saved.step} to {saved.where} ({saved.seconds:.1f} s)"


def in_one_line(text: str, max_characters: int) -> str:
    """Joins the lines of a text, and replaces the middle of a long one with an ellipsis."""
    text = visible(" ".join(text.split()))
    if len(text) > max_characters:
        first = max_characters * 2 // 3
        text = f"{text[:first]} … {text[first + 3 - max_characters :]}"
    return text


def _step_figures(step: Step) -> str:
    width = len(str(step.num_steps))
    return (
        f"step {step.step:>{width}}/{step.num_steps}  loss {step.loss:.4f}  lr {step.learning_rate:.2e}  "
        f"grad {step.grad_norm:.3f}"
    )


def _skipped(num_skipped: int) -> str:
    return f"  skipped {num_skipped}" if num_skipped else ""


def _at(step: int) -> str:
    return f"at step {step}" if step else "of the base model"


def _amount(work: Progress) -> str:
    if work.unit == "bytes":
        return f"{format_bytes(work.done)} of {format_bytes(work.total)}"
    return f"{work.done:,}/{work.total:,}"


def _sample_lines(sampled: Sampled, cut: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    """Yields (mark, text, style) of each prompt, of its answer, and of the expected answer if it is a different one."""
    for sample in sampled.samples[:SHOWN_SAMPLES]:
        yield "?", cut(sample.prompt), "dim"
        yield ">", cut(sample.answer) or "(nothing)", "green" if _is_right(sample) else ""
        if sample.expected is not None and not _is_right(sample):
            yield "=", cut(sample.expected), "dim"
    if num_hidden := len(sampled.samples[SHOWN_SAMPLES:]):
        yield " ", f"and {num_hidden} more", "dim"


def _is_right(sample: Sample) -> bool:
    return sample.expected is not None and is_right(sample.expected, sample.answer)


# Plain lines

Frequent = Step | Evaluated | Sampled | Saved  # a long run has many of these


@dataclass(frozen=True)
class _LineLimits:
    """Approximate number of lines of each kind in a long run."""

    first_steps: int
    steps: int
    evaluations: int
    samples: int
    saves: int
    parts: int  # of the progress of one piece of work


_LOG = _LineLimits(first_steps=10, steps=100, evaluations=100, samples=100, saves=100, parts=LOGGED_PARTS)
_NOTEBOOK = _LineLimits(first_steps=1, steps=20, evaluations=8, samples=2, saves=3, parts=2)


class _PlainLines:
    """Prints events as lines of text. In a long run it holds most of them back, and prints the latest held one of each
    kind before a message and at the end."""

    def __init__(self, file: IO[str], limits: _LineLimits) -> None:
        self._file = file
        self._limits = limits
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

    def show(self, event: Event) -> None:
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
            case Step() | Evaluated() | Sampled() | Saved():
                if isinstance(event, Step):
                    self._follow(event)
                self._held.pop(type(event), None)
                if self._is_due(event):
                    self._print_event(event)
                else:
                    self._held[type(event)] = event

    def _follow(self, step: Step) -> None:
        self._num_skipped += step.skipped
        self._num_steps = step.num_steps
        if step.stage != self._stage and self._stage is not None:
            self._print_held()
            self._print(f"stage {step.stage} starts")
        self._stage = step.stage

    def _is_due(self, event: Frequent) -> bool:
        if type(event) not in self._printed:
            return True
        if isinstance(event, Step):
            every = max(1, event.num_steps // self._limits.steps)
            return event.step <= self._limits.first_steps or event.step % every == 0 or event.step == event.num_steps
        lines = {Evaluated: self._limits.evaluations, Sampled: self._limits.samples, Saved: self._limits.saves}
        return event.step - self._printed[type(event)] >= self._num_steps // lines[type(event)]

    def _print_event(self, event: Frequent) -> None:
        self._printed[type(event)] = event.step
        match event:
            case Step():
                self._print(step_line(event, self._num_skipped))
            case Evaluated():
                self._print(evaluation_line(event))
            case Saved():
                self._print(saved_line(event))
            case Sampled():
                self._print(f"samples {_at(event.step)}")
                for mark, text, _ in _sample_lines(event, lambda text: in_one_line(text, SAMPLE_CHARACTERS)):
                    self._print(f"  {mark} {text}")

    def _print_held(self) -> None:
        for event in self._held.values():
            self._print_event(event)
        self._held.clear()

    def _show_progress(self, work: Progress) -> None:
        part, line = work.done * self._limits.parts // max(work.total, 1), f"{work.label}  {_amount(work)}"
        last_part, last_line = self._parts.get(work.label, (-1, ""))
        if part != last_part and line != last_line:
            self._print(line)
            self._parts[work.label] = part, line
        if work.done >= work.total:
            self._parts.pop(work.label, None)

    def _print(self, line: str) -> None:
        self._file.write(visible(line) + "\n")
        self._file.flush()


# The panel


class _LivePanel:
    """Lines worth keeping scroll by; a panel with the run, and bars of other work, stay below them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._drawn = -math.inf
        self._works: dict[str, Progress] = {}
        self._step: Step | None = None
        self._stage: str | None = None
        self._losses: deque[float] = deque(maxlen=NUM_LOSSES)
        self._num_skipped = 0
        self._evaluated: Evaluated | None = None
        self._best: Evaluated | None = None
        self._saved: Saved | None = None
        self._live = Live(
            console=console,
            auto_refresh=False,  # draw only when something changed
            get_renderable=self._picture,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # a piped stdout is data for a program
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            with self._live, guarded_output():  # the guard is above rich's own replacement, which reads colors
                try:
                    yield
                finally:
                    self._works.clear()
                    self._live.transient = self._step is None  # keep the panel of a run as its summary
        finally:
            self._live.transient = True

    def show(self, event: Event) -> None:
        match event:
            case Note(text):
                self._print(Text(visible(text)))
            case Alarm(text=text) | Skipped(text=text):
                self._print(Text(visible(f"alarm: {text}"), "bold red"))
            case Chosen(path, value, reason):
                bold = (visible(str(value)), "bold")
                self._print(Text.assemble(f"{visible(path)} = ", bold, (f"  ({visible(reason)})", "dim")))
            case Progress():
                self._show_progress(event)
            case Step():
                self._show_step(event)
            case Evaluated():
                self._evaluated = event
                self._best = event if event.is_best or self._best is None else self._best
                self._print(Text(evaluation_line(event), "cyan"))
            case Sampled():
                self._show_samples(event)
            case Saved():
                self._saved = event
                self._draw()

    def _show_progress(self, work: Progress) -> None:
        if work.done >= work.total:
            self._works.pop(work.label, None)
            self._draw(now=True)  # the next work may be long and send no events
        else:
            self._works[work.label] = work
            self._draw()

    def _show_step(self, step: Step) -> None:
        if step.stage != self._stage and self._stage is not None:
            self._print(Text(visible(f"stage {step.stage} starts"), "bold"))
        self._stage = step.stage
        self._step = step
        self._num_skipped += step.skipped
        self._losses.append(step.loss)
        if step.step % max(1, step.num_steps // KEPT_STEPS) == 0 or step.step in (1, step.num_steps):
            line = Text(f"{_step_figures(step)}{_skipped(self._num_skipped)}", no_wrap=True, overflow="ellipsis")
            self._print(line)
        else:
            self._draw()

    def _show_samples(self, sampled: Sampled) -> None:
        width = max(self._console.width - 4, 20)
        text = Text.assemble((f"samples {_at(sampled.step)}", "bold"))
        for mark, line, style in _sample_lines(sampled, lambda text: in_one_line(text, width * ANSWER_LINES)):
            parts = Text(line, style).wrap(self._console, width)
            for number, part in enumerate(parts[:ANSWER_LINES], 1):
                if number == ANSWER_LINES < len(parts):
                    part.append(" …")
                    part.truncate(width, overflow="ellipsis")
                text.append(f"\n  {mark if number == 1 else ' '} ", "dim")
                text.append_text(part)
        self._print(text)

    def _print(self, text: Text) -> None:
        self._live.refresh()  # printing redraws the panel as it was last refreshed
        self._console.print(text)
        self._drawn = time.monotonic()

    def _draw(self, *, now: bool = False) -> None:
        if now or time.monotonic() - self._drawn >= REDRAW_SECONDS:
            self._drawn = time.monotonic()
            self._live.refresh()

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = []
        width = min(self._console.width, MAX_PANEL)
        if self._step is not None:
            inside = self._run(self._step, width - 4)
            name = visible_line(self._step.stage) or "training"
            parts.append(Panel(inside, title=Text(name), title_align="left", border_style="dim", width=width))
        for work in self._works.values():
            parts.append(_bar(visible_line(work.label), work.done, work.total, _amount(work), min(width, MAX_BAR)))
        return Group(*parts)

    def _run(self, step: Step, width: int) -> RenderableType:
        is_over = step.step >= step.num_steps
        duration = f"took {format_duration(step.seconds)}" if is_over else f"left {format_duration(step.seconds_left)}"
        amount = f"{step.step / max(step.num_steps, 1):>4.0%}  {duration}"
        label = f"step {step.step:>{len(str(step.num_steps))}}/{step.num_steps}"
        bar = _bar(label, step.step, step.num_steps, amount, width)
        curve = self._curve(max(8, min(NUM_LOSSES, width - 60)))  # leaves room for the evaluation on its right
        loss = [Text.assemble("loss ", (f"{step.loss:.4f}", "bold"), " ", (curve, "cyan"))]
        if self._evaluated is not None and self._best is not None:
            loss.append(Text.assemble("evaluation ", (f"{self._evaluated.loss:.4f}", "bold")))
            loss.append(Text(f"best {self._best.loss:.4f} {_at(self._best.step)}"))
        rest = [Text.assemble((f"{step.tokens_per_second:,.0f}", "bold"), " tokens/s")]
        if step.peak_fraction is not None:
            rest.append(Text(f"{step.peak_fraction:.0%} of peak"))
        if step.memory_gib is not None:
            rest.append(Text(f"memory {step.memory_gib:.1f} GiB"))
        rest += [Text(f"padding {step.padding:.0%}"), Text(f"lr {step.learning_rate:.2e}")]
        if self._num_skipped:
            rest.append(Text(f"skipped {self._num_skipped}", "bold yellow"))
        if self._saved is not None:
            rest.append(Text(f"saved step {self._saved.step}"))
        return Group(bar, *_rows(loss, width), *_rows(rest, width))

    def _curve(self, length: int) -> str:
        letters = "▁▂▃▄▅▆▇█" if self._console.encoding.lower().startswith("utf") else "._-=*^"
        losses = list(self._losses)[-length:]
        finite = [loss for loss in losses if math.isfinite(loss)]
        low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
        per_letter = (high - low) / (len(letters) - 1) or 1.0
        return "".join(letters[round((x - low) / per_letter)] if math.isfinite(x) else "!" for x in losses)


def _bar(label: str, done: int, total: int, amount: str, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    table.width = width
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=1, min_width=4)
    table.add_column(no_wrap=True)
    table.add_row(Text(label), ProgressBar(max(total, 1), done, finished_style="bar.complete"), Text(amount))
    return table


def _rows(items: list[Text], width: int) -> list[Text]:
    """Puts as many items as fit into each row, without breaking an item."""
    rows: list[Text] = []
    for item in items:
        if rows and rows[-1].cell_len + 3 + item.cell_len <= width:
            rows[-1].append("   ").append_text(item)
        else:
            item.no_wrap, item.overflow = True, "ellipsis"
            rows.append(item)
    return rows


def _choose_view(console: Console) -> _PlainLines | _LivePanel:
    # A command that a notebook starts with `!` sees a terminal without a cursor. The variable is set in such processes.
    if console.is_jupyter or (console.is_terminal and "JPY_PARENT_PID" in os.environ):
        return _PlainLines(console.file, _NOTEBOOK)
    if console.is_terminal and not console.is_dumb_terminal:
        return _LivePanel(console)
    return _PlainLines(console.file, _LOG)
