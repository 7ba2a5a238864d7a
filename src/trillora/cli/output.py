"""What a command prints: events of a run, progress on stderr, results as text or JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trillora.report.output import closed_pipe_safe, masked, unguarded

if TYPE_CHECKING:
    from pathlib import Path

    import typer

    from trillora.evaluation.evaluate import Evaluation
    from trillora.events import Event, Listener


SILENT_SECONDS = 0.4  # until a command says that it is at work; starting Python takes as long


@contextmanager
def run_events(as_json: bool, backend: str = "auto", every_steps: int | None = None) -> Iterator[Listener]:
    """Shows the events of a run on stdout, for people (`every_steps` as in `console_listener`) or all of them as
    JSON."""
    from trillora.devices.quiet import quiet_libraries

    quiet_libraries(backend)
    if as_json:
        yield _print_event
        return
    with sign_of_life() as started:
        from trillora.report.console import console_listener

        with console_listener(every_steps=every_steps) as listener:
            yield _after(started, listener)


@contextmanager
def progress_on_stderr(*, as_json: bool = False) -> Iterator[Listener]:
    """Shows events on stderr, for commands whose result goes to stdout."""
    from trillora.devices.quiet import quiet_libraries

    quiet_libraries()
    with sign_of_life(silent=as_json) as started:
        from trillora.report.console import console_listener
        from trillora.report.safe_console import SafeConsole

        with console_listener(SafeConsole(stderr=True)) as listener:
            yield _after(started, listener)


@contextmanager
def sign_of_life(*, silent: bool = False) -> Iterator[Callable[[], None]]:
    """Says on stderr that the command is at work, if it shows nothing else before. Mistakes are found earlier and need
    no such line. Yields a function that is called when something else is shown."""
    is_own = unguarded(sys.stderr) is sys.__stderr__  # no other program reads it instead of a person
    if silent or not is_own or "jax" in sys.modules:  # nothing large is left to import
        yield lambda: None
        return
    timer = threading.Timer(SILENT_SECONDS, _say_starting)
    timer.daemon = True
    timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def _say_starting() -> None:
    with contextlib.suppress(OSError, ValueError):  # stderr was closed
        print("Starting: jax and transformers are loaded first", file=closed_pipe_safe(sys.stderr), flush=True)


def _after(started: Callable[[], None], listener: Listener) -> Listener:
    """The listener. Its first event replaces the sign of life."""

    def listen(event: Event) -> None:
        started()
        listener(event)

    return listen


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
    from trillora.report.eval_table import show
    from trillora.report.safe_console import SafeConsole

    show(evaluation, SafeConsole())


def show_stopped(run: Path, context: typer.Context, as_json: bool) -> None:
    """The last lines of a run that was interrupted."""
    if not as_json:
        from trillora.report.run.next_steps import after_stop

        print(after_stop(run, context.find_root().meta["command"]), end="")


def print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def _print_event(event: Event) -> None:
    from trillora.events import to_json

    print(to_json(masked(event)), file=closed_pipe_safe(sys.stdout), flush=True)
