"""How a run looks in a terminal, and in a log file.

In a terminal one line at the bottom moves with every step, and some of the steps stay above it as a table. Where
nobody watches (a pipe, a notebook's log) every event is a plain line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from trillora.doctor import Finding
from trillora.events import Chosen, Event, Listener, Note, Progress, Step

KEPT_STEPS = 20  # steps of a run that stay on the screen
LOGGED_PARTS = 10  # lines a log gets for one piece of work


@contextmanager
def console_listener(console: Console | None = None) -> Iterator[Listener]:
    """A listener that shows events on the console until the block ends."""
    console = console or Console(highlight=False)
    if not console.is_terminal:
        yield _PlainLines(console)
        return
    bars = Bars(
        TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), console=console, transient=True
    )
    with bars:
        yield _LiveLines(console, bars)


def show_findings(findings: Iterable[Finding], console: Console | None = None) -> None:
    """The doctor's findings, each with its way out below it."""
    console = console or Console(highlight=False)
    looks = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "broken": ("broken ", "bold red")}
    for finding in findings:
        word, style = looks[finding.state]
        console.print(Text.assemble((word, style), f"  {finding.name:<15} {finding.what}"), soft_wrap=True)
        if finding.do:
            console.print(Text.assemble(" " * 25, ("do: ", "dim"), finding.do), soft_wrap=True)


def step_line(step: Step) -> str:
    """One step in figures that line up below each other."""
    left = step.seconds / step.step * (step.num_steps - step.step) if step.step else 0.0
    width = len(str(step.num_steps))
    return (
        f"step {step.step:>{width}}/{step.num_steps}  loss {step.loss:.4f}  lr {step.learning_rate:.2e}  "
        f"grad {step.grad_norm:.3f}  {step.tokens_per_second:,.0f} tokens/s  left {timedelta(seconds=round(left))}"
    )


def chosen_line(chosen: Chosen) -> str:
    """A chosen value and its reason."""
    return f"{chosen.path} = {chosen.value}  ({chosen.reason})"


class _PlainLines:
    """Every event a line of text; long work says how far it is a few times."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told: dict[str, int] = {}  # label -> parts of the work already told

    def __call__(self, event: Event) -> None:
        match event:
            case Note(text):
                self._print(text)
            case Chosen():
                self._print(chosen_line(event))
            case Step():
                self._print(step_line(event))
            case Progress(label, done, total):
                part = done * LOGGED_PARTS // max(total, 1)
                if part != self._told.get(label):
                    self._told[label] = part
                    self._print(f"{label} {done}/{total}")

    def _print(self, line: str) -> None:
        # Text as it is: no markup, no wrapping at a width nobody has.
        self._console.print(Text(line), soft_wrap=True)


class _LiveLines:
    """Notes and some steps scroll by; the work at hand is a moving line below them."""

    def __init__(self, console: Console, bars: Bars) -> None:
        self._console = console
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, event: Event) -> None:
        match event:
            case Note(text):
                self._console.print(Text(text))
            case Chosen(path, value, reason):
                self._console.print(Text.assemble(f"{path} = ", (str(value), "bold"), (f"  ({reason})", "dim")))
            case Progress(label, done, total):
                self._move(label, label, done, total)
            case Step():
                if event.step % max(1, event.num_steps // KEPT_STEPS) == 0 or event.step in (1, event.num_steps):
                    self._console.print(Text(step_line(event)))
                self._move("step", step_line(event), event.step, event.num_steps)

    def _move(self, name: str, text: str, done: int, total: int) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(text, total=total)
        self._bars.update(self._tasks[name], description=text, completed=done, total=total)
        if done >= total:
            self._bars.remove_task(self._tasks.pop(name))
