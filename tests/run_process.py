"""Runs as processes: started through the real command line, listened to, and interrupted again and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny_run

WAIT = 900  # seconds for a run to end; a busy machine takes minutes to start one


def trillora(*arguments: str, environment: dict[str, str] | None = None, **pipes: Any) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    command = [sys.executable, "-m", "trillora", *arguments]
    return subprocess.Popen(command, text=True, env={**os.environ, **(environment or {})}, **streams)


def start(recipe: Path, out: Path, **pipes: Any) -> subprocess.Popen[str]:
    return trillora("train", str(recipe), "--out", str(out), "--json", **pipes)


def events_of(process: Any) -> Iterator[dict[str, Any]]:
    """What a run started by `start` tells, while it tells it."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def finish(recipe: Path, out: Path) -> Path:
    """The run, taken to its end."""
    process = start(recipe, out)
    _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0, errors
    return out


def interrupt_often(
    recipe: Path,
    place: Path,
    num_wanted: int,
    interrupt: Callable[[Any, Path], bool],
    begin: Callable[[Path, Path], Any] = start,
) -> list[Path]:
    """Starts a run and hands its process to `interrupt`, so often that it was interrupted `num_wanted` times. A run
    that reaches its end is followed by another; the last is let to its end. Every run, finished."""
    runs: list[Path] = []
    num_done = 0
    while num_done < num_wanted:
        if not runs or (runs[-1] / "adapter").exists():
            runs.append(place / f"run-{len(runs)}")
        num_done += interrupt(begin(recipe, runs[-1]), runs[-1])
    if not (runs[-1] / "adapter").exists():
        finish(recipe, runs[-1])
    return runs


def leftovers(run: Path) -> list[str]:
    """What writes that were cut off have left beside the checkpoints."""
    checkpoints = run / "checkpoints"
    return sorted(path.name for path in checkpoints.glob(".*")) if checkpoints.exists() else []


def check_all_readable(run: Path) -> None:
    """Whatever is visible is whole."""
    checkpoints = tiny_run.checkpoints_of(run)
    for step in checkpoints.steps():
        checkpoints.read(step)  # raises where one is damaged
