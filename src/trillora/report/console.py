"""How a run looks in a terminal, in a notebook, and in a log file.

In a terminal a panel at the bottom moves with the run, and what is worth keeping scrolls by above it. Where nobody
watches every event is a plain line, fewer of them in a long run; in a notebook, whose cells cannot move a cursor, fewer
still. Output that was closed never stops a run. Text of strangers (rows, answers) is only ever text: what a terminal
would obey is spelled out.
"""

from __future__ import annotations

import io
import math
import os
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import IO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trillora.doctor import Finding
from trillora.events import (
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

KEPT_STEPS = 20  # steps of a run that stay on the screen
LOGGED_PARTS = 10  # lines a log gets for one piece of work
REDRAW_SECONDS = 0.25
REPEAT_SECONDS = 10.0  # work that was told before is told again only if it takes long
NUM_LOSSES = 32  # in the small curve of a wide panel
SHOWN_SAMPLES = 4  # of one round
SAMPLE_CHARACTERS = 240  # of a prompt or an answer in a log
ANSWER_LINES = 2  # in a terminal
LONGEST_TIME = 1000 * 86400  # seconds; more is no forecast
MAX_PANEL, MAX_BAR = 120, 80  # columns; wider ones are harder to read


@contextmanager
def console_listener(console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows events on the console until the block ends. It never fails, and threads may share it."""
    console = console or Console(highlight=False)
    file = console.file
    console.file = closed_pipe_safe(file)
    shown = _choose(console)
    lock = threading.Lock()

    def listen(event: Event) -> None:
        with lock:
            shown.show(event)

    try:
        with shown.open():
            yield listen
    finally:
        console.file = file


def closed_pipe_safe(file: IO[str]) -> IO[str]:
    """The file, for writing that never fails: what cannot be written goes nowhere, and so does all that follows."""
    return cast(IO[str], _MayClose(file))


def let_go_of_closed_output() -> None:
    """What stdout and stderr still hold is written; one that was closed leads nowhere from here on, so that Python has
    nothing to complain about when it flushes them at its end."""
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            _MayClose(file).flush()


def show_findings(findings: Iterable[Finding], console: Console | None = None) -> None:
    """The doctor's findings, each with its way out below it."""
    console = console or Console(highlight=False)
    looks = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "broken": ("broken ", "bold red")}
    for finding in findings:
        word, style = looks[finding.state]
        console.print(Text.assemble((word, style), f"  {finding.name:<15} {finding.what}"), soft_wrap=True)
        if finding.do:
            console.print(Text.assemble(" " * 25, ("do: ", "dim"), finding.do), soft_wrap=True)


# Events as text


def step_line(step: Step, num_skipped: int = 0) -> str:
    """One step in figures that line up below each other."""
    return (
        f"{_step_figures(step)}  {step.tokens_per_second:,.0f} tokens/s  left {_duration(step.seconds_left)}"
        f"{_skipped(num_skipped)}"
    )


def chosen_line(chosen: Chosen) -> str:
    """A chosen value and its reason."""
    return f"{chosen.path} = {chosen.value}  ({chosen.reason})"


def evaluation_line(evaluated: Evaluated) -> str:
    """Figures of the evaluation set; the best so far says so."""
    return (
        f"evaluation of {_moment(evaluated.step)}  loss {evaluated.loss:.4f}  perplexity {evaluated.perplexity:.2f}  "
        f"accuracy {evaluated.accuracy:.1%}{'  best' if evaluated.is_best else ''}"
    )


def saved_line(saved: Saved) -> str:
    return f"saved step {saved.step} to {saved.where} ({saved.seconds:.1f} s)"


def readable(text: str, *, kept: str = "\n\t") -> str:
    """Text that can do nothing but be read: control and direction characters are spelled out. Joiners of letters and
    emoji stay, and so do spaces of all widths."""
    kept += "\u200c\u200d"
    return "".join(
        c if c.isprintable() or c in kept or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def in_one_line(text: str, longest: int) -> str:
    """Readable, without line breaks, and without its middle if it is long."""
    text = readable(" ".join(text.split()), kept="")
    if len(text) > longest:
        first = longest * 2 // 3
        text = f"{text[:first]} … {text[first + 3 - longest :]}"
    return text


def _step_figures(step: Step) -> str:
    width = len(str(step.num_steps))
    return (
        f"step {step.step:>{width}}/{step.num_steps}  loss {step.loss:.4f}  lr {step.learning_rate:.2e}  "
        f"grad {step.grad_norm:.3f}"
    )


def _skipped(num_skipped: int) -> str:
    return f"  skipped {num_skipped}" if num_skipped else ""


def _moment(step: int) -> str:
    return f"step {step}" if step else "the base"


def _duration(seconds: float) -> str:
    if not 0 <= seconds < LONGEST_TIME:  # NaN is not
        return "?"
    return str(timedelta(seconds=round(seconds)))


def _sample_lines(sampled: Sampled, cut: Callable[[str], str]) -> Iterator[tuple[str, str, str]]:
    """(mark, text, style): a prompt, its answer, and what was expected where that is known and differs."""
    for sample in sampled.samples[:SHOWN_SAMPLES]:
        yield "?", cut(sample.prompt), "dim"
        yield ">", cut(sample.answer) or "(nothing)", "green" if _is_right(sample) else ""
        if sample.expected is not None and not _is_right(sample):
            yield "=", cut(sample.expected), "dim"
    if left := len(sampled.samples[SHOWN_SAMPLES:]):
        yield " ", f"and {left} more", "dim"


def _is_right(sample: Sample) -> bool:
    return sample.expected is not None and sample.answer.strip() == sample.expected.strip()


# Plain lines

Moment = Step | Evaluated | Sampled | Saved  # of which a long run has many


@dataclass(frozen=True)
class _Dose:
    """About how many lines of a kind a long run gets."""

    first_steps: int
    steps: int
    evaluations: int
    samples: int
    saves: int
    parts: int  # of one piece of other work


_LOG = _Dose(first_steps=10, steps=100, evaluations=100, samples=100, saves=100, parts=LOGGED_PARTS)
_NOTEBOOK = _Dose(first_steps=1, steps=20, evaluations=8, samples=2, saves=3, parts=2)


class _PlainLines:
    """Every event a line of text. In a long run only some, and the latest of those left out when something is said."""

    def __init__(self, file: IO[str], dose: _Dose) -> None:
        self._file = file
        self._dose = dose
        self._num_steps = 0
        self._num_skipped = 0
        self._stage: str | None = None
        self._told: dict[type[Moment], int] = {}  # kind -> step it was last told of
        self._held: dict[type[Moment], Moment] = {}  # kind -> the latest that was not told
        self._parts: dict[str, tuple[int, float]] = {}  # work -> parts told, and when
        self._done: set[str] = set()  # work that was told to its end

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._tell_held()

    def show(self, event: Event) -> None:
        match event:
            case Note(text):
                self._tell_held()
                self._print(text)
            case Alarm(text=text) | Skipped(text=text):
                self._tell_held()
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
                    self._tell(event)
                else:
                    self._held[type(event)] = event

    def _follow(self, step: Step) -> None:
        self._num_skipped += step.skipped
        self._num_steps = step.num_steps
        if step.stage != self._stage and self._stage is not None:
            self._tell_held()
            self._print(f"stage {step.stage} begins")
        self._stage = step.stage

    def _is_due(self, event: Moment) -> bool:
        if type(event) not in self._told:
            return True
        if isinstance(event, Step):
            every = max(1, event.num_steps // self._dose.steps)
            return event.step <= self._dose.first_steps or event.step % every == 0 or event.step == event.num_steps
        lines = {Evaluated: self._dose.evaluations, Sampled: self._dose.samples, Saved: self._dose.saves}
        return event.step - self._told[type(event)] >= self._num_steps // lines[type(event)]

    def _tell(self, event: Moment) -> None:
        self._told[type(event)] = event.step
        match event:
            case Step():
                self._print(step_line(event, self._num_skipped))
            case Evaluated():
                self._print(evaluation_line(event))
            case Saved():
                self._print(saved_line(event))
            case Sampled():
                self._print(f"samples of {_moment(event.step)}")
                for mark, text, _ in _sample_lines(event, lambda text: in_one_line(text, SAMPLE_CHARACTERS)):
                    self._print(f"  {mark} {text}")

    def _tell_held(self) -> None:
        for event in self._held.values():
            self._tell(event)
        self._held.clear()

    def _show_progress(self, work: Progress) -> None:
        label, part = work.label, work.done * self._dose.parts // max(work.total, 1)
        told, when = self._parts.get(label, (-1, -math.inf))
        if part == told or (label in self._done and time.monotonic() - when < REPEAT_SECONDS):
            return
        self._parts[label] = (part, time.monotonic())
        if work.done >= work.total:
            self._done.add(label)
        self._print(f"{label} {work.done}/{work.total}")

    def _print(self, line: str) -> None:
        self._file.write(readable(line) + "\n")
        self._file.flush()


# The panel


class _LivePanel:
    """What is worth keeping scrolls by; the run, and other work at hand, move below it."""

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
            auto_refresh=False,  # drawn when something changed, and not by a thread of its own
            get_renderable=self._picture,
            redirect_stdout=sys.stdout is not None and sys.stdout.isatty(),  # a pipe's stdout is somebody's data
        )

    @contextmanager
    def open(self) -> Iterator[None]:
        try:
            with self._live:
                try:
                    yield
                finally:
                    self._works.clear()
                    self._live.transient = self._step is None  # the panel of a run stays as its summary
        finally:
            self._live.transient = True

    def show(self, event: Event) -> None:
        match event:
            case Note(text):
                self._print(Text(readable(text)))
            case Alarm(text=text) | Skipped(text=text):
                self._print(Text(readable(f"alarm: {text}"), "bold red"))
            case Chosen(path, value, reason):
                value = (readable(str(value)), "bold")
                self._print(Text.assemble(f"{readable(path)} = ", value, (f"  ({readable(reason)})", "dim")))
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
            self._draw(at_once=True)  # what comes next may be long and silent
        else:
            self._works[work.label] = work
            self._draw()

    def _show_step(self, step: Step) -> None:
        if step.stage != self._stage and self._stage is not None:
            self._print(Text(readable(f"stage {step.stage} begins"), "bold"))
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
        text = Text.assemble((f"samples of {_moment(sampled.step)}", "bold"))
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
        self._live.refresh()  # what is printed carries the panel with it: the newest
        self._console.print(text)
        self._drawn = time.monotonic()

    def _draw(self, *, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._drawn >= REDRAW_SECONDS:
            self._drawn = now
            self._live.refresh()

    def _picture(self) -> RenderableType:
        parts: list[RenderableType] = []
        width = min(self._console.width, MAX_PANEL)
        if self._step is not None:
            inside = self._run(self._step, width - 4)
            name = readable(self._step.stage, kept="") or "training"
            parts.append(Panel(inside, title=Text(name), title_align="left", border_style="dim", width=width))
        for work in self._works.values():
            label, told = readable(work.label, kept=""), f"{work.done}/{work.total}"
            parts.append(_bar(label, work.done, work.total, told, min(width, MAX_BAR)))
        return Group(*parts)

    def _run(self, step: Step, width: int) -> RenderableType:
        is_over = step.step >= step.num_steps
        told = f"took {_duration(step.seconds)}" if is_over else f"left {_duration(step.seconds_left)}"
        told = f"{step.step / max(step.num_steps, 1):>4.0%}  {told}"
        label = f"step {step.step:>{len(str(step.num_steps))}}/{step.num_steps}"
        bar = _bar(label, step.step, step.num_steps, told, width)
        curve = self._curve(max(8, min(NUM_LOSSES, width - 60)))  # beside it, on one row, the evaluation
        loss = [Text.assemble("loss ", (f"{step.loss:.4f}", "bold"), " ", (curve, "cyan"))]
        if self._evaluated is not None and self._best is not None:
            loss.append(Text.assemble("evaluation ", (f"{self._evaluated.loss:.4f}", "bold")))
            loss.append(Text(f"best {self._best.loss:.4f} ({_moment(self._best.step)})"))
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


def _bar(label: str, done: int, total: int, told: str, width: int) -> RenderableType:
    table = Table.grid(padding=(0, 1), expand=True)
    table.width = width
    table.add_column(no_wrap=True, overflow="ellipsis")
    table.add_column(ratio=1, min_width=4)
    table.add_column(no_wrap=True)
    table.add_row(Text(label), ProgressBar(max(total, 1), done, finished_style="bar.complete"), Text(told))
    return table


def _rows(items: list[Text], width: int) -> list[Text]:
    """Items side by side, as many as fit in a row; an item is never broken."""
    rows: list[Text] = []
    for item in items:
        if rows and rows[-1].cell_len + 3 + item.cell_len <= width:
            rows[-1].append("   ").append_text(item)
        else:
            item.no_wrap, item.overflow = True, "ellipsis"
            rows.append(item)
    return rows


def _choose(console: Console) -> _PlainLines | _LivePanel:
    # What a notebook starts with `!` has a terminal that knows no cursor; only a kernel's children see this variable.
    if console.is_jupyter or (console.is_terminal and "JPY_PARENT_PID" in os.environ):
        return _PlainLines(console.file, _NOTEBOOK)
    if console.is_terminal and not console.is_dumb_terminal:
        return _LivePanel(console)
    return _PlainLines(console.file, _LOG)


class _MayClose(io.TextIOBase):
    """A file whose other end may go away: from then on what is written goes nowhere, and nobody is told."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._is_silent = False

    def write(self, text: str) -> int:
        self._try(lambda: self._write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._file.flush)

    def isatty(self) -> bool:
        with suppress(ValueError):  # closed already
            return self._file.isatty()
        return False

    def fileno(self) -> int:
        return self._file.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
        except UnicodeEncodeError:
            self._file.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))

    def _try(self, action: Callable[[], object]) -> None:
        if self._is_silent:
            return
        try:
            action()
        except BlockingIOError:
            pass  # a slow reader nobody shall wait for: this text is lost
        except (OSError, ValueError):
            self._is_silent = True
            # Python flushes at its end what it could not write, and would complain: let that go nowhere, too.
            with suppress(OSError, ValueError):  # no file of the system's
                descriptor = self._file.fileno()
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
