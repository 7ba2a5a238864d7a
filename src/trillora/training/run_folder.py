"""A run's folder: the files for people and for the report, written so that a crash leaves them readable.

`metrics.jsonl` has one event per line (`trillora.events`). The recipe determines its content, except for times, speeds
and memory. `history.jsonl` records starts and stops of the run, `run.json` what it was made from.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trillora.early.training import check_is_folder
from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, HistoryEntry, Listener, ignore_events, to_metrics_line
from trillora.files.atomic import append_file, write_file
from trillora.files.bounded import read_bounded
from trillora.runs.files import HISTORY_FILE, METRICS_FILE, STALLS_FILE

MAX_LOG = 1 << 30  # bytes; a million steps have about 300 MB


class RunFolder:
    """Only one process of a run writes; for the others every write is a no-op."""

    def __init__(self, path: Path, *, writes: bool = True, listener: Listener = ignore_events) -> None:
        self.path, self._writes, self._listener = path, writes, listener
        self._waiting: dict[Path, bytes] = {}  # lines that a full disk refused
        self._has_alarmed = False
        check_is_folder(path)
        if writes:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TrilloraError(
                    f"The run's folder cannot be created: {error.strerror}.", where=str(path), do="choose another --out"
                ) from error

    @property
    def metrics_file(self) -> Path:
        return self.path / METRICS_FILE

    def write(self, name: str, text: str, *, mode: int = 0o666) -> None:
        self._replace(self.path / name, text.encode(), mode)

    def start_metrics(self, content: bytes = b"") -> None:
        """Reset the metrics to a checkpoint's. Later lines are removed: their steps are trained again."""
        self._replace(self.metrics_file, content)

    def _replace(self, file: Path, content: bytes, mode: int = 0o666) -> None:
        if not self._writes:
            return
        with self.reported(file):
            write_file(file, content, mode=mode)

    @contextlib.contextmanager
    def reported(self, file: Path) -> Iterator[None]:
        """Turns an OSError of the block, which writes `file`, into an error with what to do."""
        try:
            yield
        except OSError as error:
            raise TrilloraError(
                f"The run's folder cannot be written to: {error.strerror}.",
                where=str(file),
                do="free disk space and run the same command again, or choose another --out",
            ) from error

    def recording(self, listener: Listener) -> Listener:
        """A listener that writes every metric as a line of metrics.jsonl, then passes the event to `listener`."""

        def listen(event: Event) -> None:
            if (line := to_metrics_line(event)) is not None:
                self._append(self.metrics_file, line)
            listener(event)

        return listen

    def metrics_so_far(self) -> Callable[[], bytes]:
        """A function that reads the metrics as they are now, even if it is called later."""
        waiting = self._waiting.get(self.metrics_file, b"")
        size = self.metrics_file.stat().st_size

        def read() -> bytes:
            with open(self.metrics_file, "rb") as file:
                return file.read(size) + waiting

        return read

    def add_history(self, event: str, step: int, reason: str = "") -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        entry = HistoryEntry(now, event, step, reason, platform.node())
        file = self.path / HISTORY_FILE
        self._append(file, ("\n" if _is_unfinished(file) else "") + json.dumps(asdict(entry)))

    def add_stall(self, text: str) -> str | None:
        """Adds to the log of steps that took long. Returns its name; None in a process that does not write."""
        self._append(self.path / STALLS_FILE, text)
        return str(self.path / STALLS_FILE) if self._writes else None

    def _append(self, file: Path, line: str) -> None:
        """Add a line. It is kept in memory while the disk is full: logging never stops training."""
        if not self._writes:
            return
        waiting = self._waiting.pop(file, b"") + line.encode() + b"\n"
        try:
            append_file(file, waiting)
        except OSError as error:
            self._waiting[file] = waiting
            if not self._has_alarmed:
                self._listener(Alarm(f"{file} cannot be written: {error.strerror}. New lines are kept in memory."))
            self._has_alarmed = True


def losses(metrics: Path) -> list[float]:
    """The training loss of every step so far."""
    return [_number(line.get("loss")) for line in read_lines(metrics) if line.get("kind") == "step"]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def read_lines(file: Path) -> Iterator[dict[str, Any]]:
    """The lines of metrics.jsonl or history.jsonl, without those that a killed process left unfinished. Something that
    is not a regular file has no lines."""
    try:
        content = read_bounded(file, MAX_LOG)
    except (FileNotFoundError, ValueError):
        return
    for line in content.splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value


def _is_unfinished(file: Path) -> bool:
    """Whether the last line of a file has no end: a process was killed while it wrote it."""
    if not file.is_file() or file.is_symlink() or file.stat().st_size == 0:
        return False
    with open(file, "rb") as stream:
        stream.seek(-1, os.SEEK_END)
        return stream.read(1) != b"\n"
