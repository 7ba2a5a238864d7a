"""Runs as processes: killed at any instant, told to stop, cut off from their terminal, raced by a second one.

Promises R1, R6, R7, R20 through the real command line. A process start costs seconds, so the dose here is small;
TRILLORA_DOSE=full takes 200 kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_run

from trillora.checkpoint import Checkpoints
from trillora.storage import open_storage

FULL = os.environ.get("TRILLORA_DOSE") == "full"
NUM_KILLS = 200 if FULL else 4
NUM_STEPS = 400 if FULL else 60
TIMES = {"seconds", "tokens_per_second", "memory_gib", "peak_fraction"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"))


def recipe_file(folder: Path, name: str, **train: Any) -> Path:
    options = {"steps": NUM_STEPS, "checkpoint_every": 5, "schedule": "cosine", **train}
    settings = tiny_run.recipe(
        folder,
        train=options,
        lora={"dropout": 0.1},
        data={"validation": str(folder / "chats.jsonl")},
        evaluate={"every": 10, "samples": 0},
    )
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings), "utf-8")
    return file


def start(recipe: Path, out: Path, **pipes: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "trillora", "train", str(recipe), "--out", str(out), "--json"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes}
    return subprocess.Popen(command, text=True, **streams)


def events_of(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)


def stopped_at(process: subprocess.Popen[str], step: int) -> float:
    """Seconds from SIGTERM, sent after this step, to the process's end; signals go on arriving meanwhile."""
    for event in events_of(process):
        if event["event"] == "step" and event["step"] == step:
            break
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    return time.monotonic() - sent


def checkpoints_of(run: Path) -> Checkpoints:
    return Checkpoints(open_storage(run / "checkpoints"))


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    process = start(recipe_file(folder, "whole"), run)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return run


def assert_same(run: Path, whole: Path) -> None:
    assert metrics(run) == metrics(whole)
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_killed_at_random_instants_it_ends_as_if_it_never_was(folder: Path, whole: Path, tmp_path: Path) -> None:
    """R1. Some come before the first step, some while a checkpoint is written. Nothing half-written is visible."""
    dice = random.Random(0)
    recipe, run = recipe_file(folder, "killed"), tmp_path / "run"
    num_kills = num_in_training = 0
    while num_kills < NUM_KILLS:
        process = start(recipe, run)
        wait = dice.choice(["start", "step", "save", "step"])
        patience = dice.randrange(1, 8) if wait == "step" else dice.randrange(1, 3)
        if wait == "start":
            time.sleep(dice.uniform(0.1, 6.0))
        else:
            for event in events_of(process):
                patience -= event["event"] == {"step": "step", "save": "saved"}[wait]
                if patience <= 0:
                    break
            time.sleep(dice.uniform(0.0, 0.05))
            num_in_training += process.poll() is None
        process.kill()
        process.communicate()
        num_kills += 1
        for step in checkpoints_of(run).steps():
            checkpoints_of(run).read(step)  # raises where one is damaged
        if (run / "adapter").exists():
            break
    process = start(recipe, run)
    _, errors = process.communicate(timeout=600)
    assert process.returncode in (0, 2), errors
    assert "finished run" in errors or process.returncode == 0, errors
    assert_same(run, whole)
    assert num_in_training >= 1 and num_kills >= min(NUM_KILLS, 3)
    assert len(checkpoints_of(run).steps()) <= 3, "two and the best"
    assert not [path for path in (run / "checkpoints").iterdir() if path.name.startswith(".")]


def test_told_to_stop_it_saves_and_says_so_by_its_exit_code(folder: Path, whole: Path, tmp_path: Path) -> None:
    """R6: while training, then while compiling; signals that follow do no harm."""
    recipe, run = recipe_file(folder, "stopped"), tmp_path / "run"
    process = start(recipe, run)
    assert stopped_at(process, 7) < 10
    assert process.returncode == 75
    (last,) = checkpoints_of(run).steps()[-1:]
    assert last >= 7 and last == metrics(run)[-1]["step"]
    before = (run / "metrics.jsonl").read_bytes()

    process = start(recipe, run)
    for event in events_of(process):
        if event["event"] == "note" and event["text"].startswith("Compiling the training step"):
            break
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert time.monotonic() - sent < 10 and process.returncode == 75
    assert checkpoints_of(run).steps()[-1] == last and (run / "metrics.jsonl").read_bytes() == before

    process = start(recipe, run)
    process.communicate(timeout=300)
    assert process.returncode == 0
    assert_same(run, whole)
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["started", "stopped", "resumed", "finished"]
    assert events[1]["reason"] == "SIGTERM"


def test_run_goes_on_when_nobody_reads_it_any_more(folder: Path, whole: Path, tmp_path: Path) -> None:
    """R7: the terminal or notebook that showed it is gone."""
    process = start(recipe_file(folder, "unread"), tmp_path / "run", stderr=subprocess.DEVNULL)
    for event in events_of(process):
        if event["event"] == "step":
            break
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert_same(tmp_path / "run", whole)


def test_second_process_is_refused_at_once_and_a_dead_owner_is_no_owner(folder: Path, tmp_path: Path) -> None:
    """R20 on whole runs. The lock is asked for before anything is read."""
    recipe, run = recipe_file(folder, "owned"), tmp_path / "run"
    owner = start(recipe, run)
    for event in events_of(owner):
        if event["event"] == "step":
            break
    second = start(recipe, run)
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 2 and str(owner.pid) in errors, errors
    owner.kill()
    owner.communicate()
    third = start(recipe, run)
    assert stopped_at(third, max(checkpoints_of(run).steps(), default=0) + 2) < 10
    assert third.returncode == 75
