"""Runs as processes: started with the real command line, followed through their events, and interrupted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tiny_run

WAIT = 900  # seconds for a run to end; on a busy machine the start alone takes minutes


def trillora(*arguments: str, environment: dict[str, str] | None = None, **pipes: Any) -> subprocess.Popen[str]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    command = [sys.executable, "-m", "trillora", *arguments]
    return subprocess.Popen(command, text=True, env={**os.environ, **(environment or {})}, **streams)


def start(recipe: Path, out: Path, **pipes: Any) -> subprocess.Popen[str]:
    return trillora("train", str(recipe), "--out", str(out), "--json", **pipes)


def events_of(process: Any) -> Iterator[dict[str, Any]]:
    """The events of a run started by `start`, as they arrive."""
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def finish(recipe: Path, out: Path, begin: Callable[[Path, Path], Any] = start) -> Path:
    """Run to the end."""
    process = begin(recipe, out)
    _, errors = process.communicate(timeout=WAIT)
    assert process.returncode == 0, errors
    return out


def interrupt_often(
    recipe: Path,
    place: Path,
    num_interruptions: int,
    interrupt: Callable[[Any, Path], bool],
    begin: Callable[[Path, Path], Any] = start,
) -> list[Path]:
    """Start a run again and again until `interrupt` has interrupted it `num_interruptions` times. A run that finishes
    is followed by a new one; the last run is completed. Returns the finished runs."""
    runs: list[Path] = []
    num_done = 0
    while num_done < num_interruptions:
        if not runs or (runs[-1] / "adapter").exists():
            runs.append(place / f"run-{len(runs)}")
        num_done += interrupt(begin(recipe, runs[-1]), runs[-1])
    if not (runs[-1] / "adapter").exists():
        finish(recipe, runs[-1], begin)
    return runs


def leftovers(run: Path) -> list[str]:
    """What interrupted writes have left in the checkpoint folder."""
    checkpoints = run / "checkpoints"
    locks = (".lock", ".lock-owner")  # the next owner takes these over
    return sorted({path.name for path in checkpoints.glob(".*")} - set(locks)) if checkpoints.exists() else []


def check_all_readable(run: Path) -> None:
    """Every visible checkpoint is complete."""
    checkpoints = tiny_run.checkpoints_of(run)
    for step in checkpoints.steps():
        checkpoints.read(step)  # raises if it is damaged
