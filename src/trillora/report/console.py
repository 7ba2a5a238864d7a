"""Shows a run in a terminal, in a notebook and in a log file.

A terminal gets a live panel at the bottom; lines worth keeping scroll above it. A log file gets one plain line per
event, thinned out in long runs. A notebook gets fewer lines, below a panel that is updated in place; a command that a
cell starts with `!` cannot move the cursor, and gets only these lines. A log:

    Progress("Loading weights", 269_042_688, 538_060_288, "bytes")  ->  Loading weights  269 MB of 538 MB
    Evaluated(step=50, loss=1.75, ...)  ->  evaluation at step 50  loss 1.7500  perplexity 5.75  accuracy 61.2%  best

Closed output never stops a run. Untrusted text (rows, answers) is shown with control characters as escapes, and rich's
markup in it has no effect.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console

from trillora.events import QUIET_SECONDS, Alarm, Event, Listener, Note, Progress
from trillora.own_command import runnable
from trillora.report.adapter_text import Adapters, Collector
from trillora.report.output import closed_pipe_safe, masked
from trillora.report.panels.notebook import NotebookPanel
from trillora.report.panels.terminal import LivePanel
from trillora.report.plain_lines import LOG, NOTEBOOK, PlainLines
from trillora.report.safe_console import SafeConsole


@contextmanager
def console_listener(console: Console | None = None, every_steps: int | None = None) -> Iterator[Listener]:
    """Yields a listener that shows events on the console. It never raises, and threads may share it.

    In plain lines, `every_steps` sets which steps are shown. Without it, their number is limited.
    """
    console = console or SafeConsole()
    file = console.file
    console.file = closed_pipe_safe(file)
    adapters = Adapters()
    view = _choose_view(console, adapters, every_steps)
    lock = threading.RLock()
    slow = _SlowWork(view.show, lock)
    collector = Collector(view.show, adapters)

    def listen(event: Event) -> None:
        event = masked(event)
        if isinstance(event, Note | Alarm):
            event = dataclasses.replace(event, text=runnable(event.text))
        with lock:
            if isinstance(event, Progress):
                slow.update(event)
            else:
                collector.add(event)

    try:
        with view.open():
            try:
                yield listen
            finally:
                slow.close()
                with lock:
                    collector.flush()
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


def _choose_view(
    console: Console, adapters: Adapters, every_steps: int | None
) -> PlainLines | LivePanel | NotebookPanel:
    if console.is_jupyter:
        return NotebookPanel(console.file, adapters, every_steps)
    # A command that a notebook starts with `!` sees a terminal without a cursor. The variable is set in such processes.
    if console.is_terminal and "JPY_PARENT_PID" in os.environ:
        return PlainLines(console.file, NOTEBOOK, adapters, every_steps)
    if console.is_terminal and not console.is_dumb_terminal:
        return LivePanel(console, adapters)
    return PlainLines(console.file, LOG, adapters, every_steps)
