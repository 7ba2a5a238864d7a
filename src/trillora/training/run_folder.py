"""A run's folder: the files a person and the report read, each written so that a crash leaves it readable.

`metrics.jsonl` is a function of the recipe but for the fields that tell time; `history.jsonl` is what happened to the
run; `run.json` what it is made of.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError
from trillora.events import Alarm, Listener, ignore_events, plain
from trillora.files.atomic import write_file


class RunFolder:
    """Written by one process of a run; the others are told not to write."""

    def __init__(self, path: Path, *, writes: bool = True, listener: Listener = ignore_events) -> None:
        self.path, self._writes, self._listener = path, writes, listener
        self._waiting: dict[Path, bytes] = {}
        self._told = False
        if path.exists() and not path.is_dir():
            raise TrilloraError("A run is a folder; this is a file.", where=str(path), do="choose another --out")
        if writes:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise TrilloraError(
                    f"The run's folder cannot be made: {error.strerror}.", where=str(path), do="choose another --out"
                ) from error

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def is_finished(self) -> bool:
        return (self.path / "adapter").exists()

    def write(self, name: str, text: str) -> None:
        self._replace(self.path / name, text.encode())

    def start_metrics(self, content: bytes = b"") -> None:
        """The metrics as they were at a checkpoint: what came after it will come again."""
        self._replace(self.metrics_file, content)

    def _replace(self, file: Path, content: bytes) -> None:
        if not self._writes:
            return
        try:
            write_file(file, content)
        except OSError as error:
            raise TrilloraError(
                f"The run's folder cannot be written to: {error.strerror}.",
                where=str(file),
                do="make room there and give the same command again, or choose another --out",
            ) from error

    def add_metrics(self, kind: str, **values: Any) -> None:
        self._append(self.metrics_file, {"kind": kind, **values})

    def metrics_so_far(self) -> Callable[[], bytes]:
        """The metrics up to now, to be read later."""
        waiting = self._waiting.get(self.metrics_file, b"")
        size = self.metrics_file.stat().st_size

        def read() -> bytes:
            with open(self.metrics_file, "rb") as file:
                return file.read(size) + waiting

        return read

    def add_history(self, event: str, step: int, reason: str = "") -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = {"time": now, "event": event, "step": step, "reason": reason, "machine": platform.node()}
        self._append(self.path / "history.jsonl", line)

    def _append(self, file: Path, values: dict[str, Any]) -> None:
        """A line that a full disk refuses waits for the next one: a run does not end for want of a log."""
        if not self._writes:
            return
        line = json.dumps({key: plain(value) for key, value in values.items()}, allow_nan=False) + "\n"
        waiting = self._waiting.pop(file, b"") + line.encode()
        size = file.stat().st_size if file.exists() else 0
        try:
            with open(file, "ab") as stream:
                stream.write(waiting)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(file, size)
            self._waiting[file] = waiting
            if not self._told:
                self._listener(Alarm(f"{file} cannot be written: {error.strerror}. Its lines are kept in memory."))
            self._told = True


def losses(metrics: Path) -> list[float]:
    """The training loss of every step so far."""
    if not metrics.exists():
        return []
    lines = (json.loads(line) for line in metrics.read_text("utf-8").splitlines())
    return [float(line["loss"]) for line in lines if line["kind"] == "step"]
