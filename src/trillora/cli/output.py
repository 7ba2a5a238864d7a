"""What a command prints: events of a run, progress on stderr, results as text or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trillora.report.output import closed_pipe_safe, masked

if TYPE_CHECKING:
    from trillora.evaluation.evaluate import Evaluation
    from trillora.events import Event, Listener


@contextmanager
def run_events(as_json: bool, backend: str = "auto", every_steps: int | None = None) -> Iterator[Listener]:
    """Shows the events of a run on stdout, for people (`every_steps` as in `console_listener`) or all of them as
    JSON."""
    from trillora.devices.quiet import quiet_libraries, start_gpu

    quiet_libraries(backend)
    start_gpu(backend)
    if as_json:
        yield _print_event
        return
    from trillora.report.console import console_listener

    with console_listener(every_steps=every_steps) as listener:
        yield listener


@contextmanager
def progress_on_stderr() -> Iterator[Listener]:
    """Shows events on stderr, for commands whose result goes to stdout."""
    from trillora.devices.quiet import quiet_libraries
    from trillora.report.console import SafeConsole, console_listener

    quiet_libraries()
    with console_listener(SafeConsole(stderr=True)) as listener:
        yield listener


def only_progress(listener: Listener) -> Listener:
    """Drops all events but progress and alarms: the report has their content."""
    from trillora.events import Alarm, Progress

    def listen(event: Event) -> None:
        if isinstance(event, Progress | Alarm):
            listener(event)

    return listen


def show_evaluation(evaluation: Evaluation, as_json: bool) -> None:
    if as_json:
        print_json(evaluation.to_dict())
        return
    from trillora.report.console import SafeConsole
    from trillora.report.eval_table import show

    show(evaluation, SafeConsole())


def show_stopped(as_json: bool) -> None:
    """The last line of a run that was interrupted."""
    if not as_json:
        from trillora.report.run.next_steps import RESUME

        print(RESUME)


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def _print_event(event: Event) -> None:
    from trillora.events import to_json

    print(to_json(masked(event)), file=closed_pipe_safe(sys.stdout), flush=True)
