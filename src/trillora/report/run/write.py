"""Writes the report of a run from its folder: during the run, after its end, or after it was killed."""

from __future__ import annotations

from pathlib import Path

from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Listener, Recorded
from trillora.files.atomic import write_file
from trillora.report.run.page import page
from trillora.report.run.read import read_run
from trillora.runs.files import REPORT_FILE


def write_report(run: Path) -> Path:
    """Write RUN/report.html atomically and return its path."""
    file = run / REPORT_FILE
    content = page(read_run(run))
    try:
        write_file(file, content)
    except OSError as error:
        raise TrilloraError(
            f"The report cannot be written: {error.strerror}.", where=str(file), do="make the run's folder writable"
        ) from None
    return file


def report_listener(run: Path, inner: Listener) -> Listener:
    """A listener that passes every event to `inner`, and writes the report whenever the run's files are complete."""

    def listen(event: Event) -> None:
        inner(event)
        if isinstance(event, Recorded):
            try:
                write_report(run)
            except Exception as error:  # a broken report must not stop training
                inner(Alarm(f"The report could not be written: {error!r}"))

    return listen
