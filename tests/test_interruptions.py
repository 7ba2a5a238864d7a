"""Runs as processes: killed at any instant, told to stop, cut off from their terminal, raced by a second one.

Promises R1, R6, R7, R20 through the real command line. A process start costs seconds, so the dose here is small;
TRILLORA_DOSE=full takes 200 kills and 40 signals.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from dose import FULL, dose, full_dose_only, tell
from run_process import WAIT, check_all_readable, events_of, finish, interrupt_often, leftovers, start
from tiny_run import assert_same, checkpoints_of, metrics
from warm_process import WarmRun

NUM_STEPS = 80
NUM_RUNS = dose(1, 8)  # each with its share of the kills, so that several processes can work at them
NUM_KILLS = -(-dose(2, 200) // NUM_RUNS)
EVALUATE_EVERY = 20
SAVE_EVERY = 5
GRACE = 10.0  # seconds from a signal to the end, as promised
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With rows to evaluate on that take long enough to be interrupted."""
    folder = tiny_run.write_small(tmp_path_factory.mktemp("small"))
    tiny_run.write_chats(folder / "others.jsonl", num_rows=120)
    return folder


def recipe_file(folder: Path, name: str, **train: Any) -> Path:
    options = {"steps": NUM_STEPS, "checkpoint_every": SAVE_EVERY, "schedule": "cosine", **train}
    settings = tiny_run.recipe(
        folder,
        train=options,
        lora={"dropout": 0.1},
        data={"validation": str(folder / "others.jsonl")},
        evaluate={"every_steps": EVALUATE_EVERY, "num_samples": 0},
    )
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(settings), "utf-8")
    return file


def stopped_at(process: subprocess.Popen[str], step: int) -> float:
    """Seconds from SIGTERM, sent after this step, to the process's end; signals go on arriving meanwhile."""
    for event in events_of(process):
        if event["event"] == "step" and event["step"] == step:
            break
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=WAIT)
    return time.monotonic() - sent


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finish(recipe_file(folder, "whole"), tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_killed_at_random_instants_it_ends_as_if_it_never_was(
    folder: Path, tmp_path: Path, seed: int, request: pytest.FixtureRequest, record_property: Record
) -> None:
    """R1. Some come before the first step, some while a checkpoint is written. Nothing half-written is visible."""
    recipe = recipe_file(folder, f"killed-{seed}", seed=seed)
    whole = request.getfixturevalue("whole") if seed == 0 else finish(recipe, tmp_path / "whole")
    dice = random.Random(seed)
    fell: Counter[str] = Counter()

    def kill(process: subprocess.Popen[str] | WarmRun, run: Path) -> bool:
        seen = _wait_at_random(process, dice)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            return False  # it was faster
        place = "during a save" if leftovers(run) else "between steps" if seen else "before the first step"
        fell[place] += 1
        check_all_readable(run)
        tell(f"run {seed}: kill {fell.total()} of {NUM_KILLS} {place}")
        return True

    # Two hundred times ten seconds of imports are half an hour; the few of `make test` are whole processes.
    runs = interrupt_often(recipe, tmp_path, NUM_KILLS, kill, begin=WarmRun if FULL else start)
    for run in runs:
        assert_same(run, whole)
        assert not leftovers(run)
        assert len(checkpoints_of(run).steps()) <= 3, "two and the best"
    assert fell.total() == NUM_KILLS
    assert fell["before the first step"] < NUM_KILLS, "some hit the training"
    record_property("kills", NUM_KILLS)
    for place, number in fell.items():
        record_property(place, number)
    record_property("runs compared", len(runs))


def _wait_at_random(process: subprocess.Popen[str] | WarmRun, dice: random.Random) -> bool:
    """Some time from the start, or a moment after some step or save; whether a step was seen."""
    wait = dice.choice(["start", "step", "saved", "step"])
    if wait == "start":
        time.sleep(dice.uniform(0.1, 6.0))
        return False
    patience, seen = dice.randrange(1, 8 if wait == "step" else 3), False
    for event in events_of(process):
        seen = seen or event["event"] == "step"
        patience -= event["event"] == wait
        if patience <= 0:
            break
    time.sleep(dice.uniform(0.0, 0.05))
    return seen


def test_told_to_stop_it_saves_and_says_so_by_its_exit_code(folder: Path, whole: Path, tmp_path: Path) -> None:
    """R6: while training, then while compiling; signals that follow do no harm."""
    recipe, run = recipe_file(folder, "stopped"), tmp_path / "run"
    process = start(recipe, run)
    assert stopped_at(process, 7) < GRACE
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
    process.communicate(timeout=WAIT)
    assert time.monotonic() - sent < GRACE and process.returncode == 75
    assert checkpoints_of(run).steps()[-1] == last and (run / "metrics.jsonl").read_bytes() == before

    finish(recipe, run)
    assert_same(run, whole)
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["started", "stopped", "resumed", "finished"]
    assert events[1]["reason"] == "SIGTERM"


@full_dose_only
def test_signals_during_evaluation_and_save_lose_nothing(
    folder: Path, whole: Path, tmp_path: Path, record_property: Record
) -> None:
    """R6 and, with the signal of a terminal that is closed, R7. A step's event comes before what follows the step."""
    dice = random.Random(1)
    num_wanted = dose(2, 40)
    hit: Counter[str] = Counter()
    slowest = 0.0

    def interrupt(process: subprocess.Popen[str], run: Path) -> bool:
        nonlocal slowest
        instant = ["evaluation", "save"][(hit["evaluation"] + hit["save"]) % 2]
        every = EVALUATE_EVERY if instant == "evaluation" else SAVE_EVERY
        for event in events_of(process):
            if event["event"] == "step" and event["step"] % every == 0:
                break
        sent = time.monotonic()
        process.send_signal(dice.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        if dice.random() < 0.5:
            time.sleep(dice.uniform(0, 0.1))
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT)
        if process.returncode == 0:
            return False  # it was the last step
        assert process.returncode == 75, errors
        slowest = max(slowest, time.monotonic() - sent)
        last = checkpoints_of(run).steps()[-1]
        assert last == metrics(run, "step")[-1]["step"], "no step was lost"
        evaluated = {line["step"] for line in metrics(run, "evaluation")}
        hit["evaluations given up"] += last % EVALUATE_EVERY == 0 and last not in evaluated
        hit[instant] += 1
        check_all_readable(run)
        tell(f"signal {hit['evaluation'] + hit['save']} of {num_wanted} during {instant}")
        return True

    for run in interrupt_often(recipe_file(folder, "signals"), tmp_path, num_wanted, interrupt):
        assert_same(run, whole)
    assert slowest < GRACE
    assert hit["evaluations given up"] >= 1
    record_property("signals", num_wanted)
    record_property("evaluations given up", hit["evaluations given up"])
    record_property("slowest end, s", round(slowest, 2))


@full_dose_only
def test_run_goes_on_when_nobody_reads_it_any_more(folder: Path, whole: Path, tmp_path: Path) -> None:
    """R7: the terminal or notebook that showed it is gone."""
    process = start(recipe_file(folder, "unread"), tmp_path / "run", stderr=subprocess.DEVNULL)
    for event in events_of(process):
        if event["event"] == "step":
            break
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=WAIT) == 0
    assert_same(tmp_path / "run", whole)


@full_dose_only
def test_second_process_is_refused_at_once_and_a_dead_owner_is_no_owner(folder: Path, tmp_path: Path) -> None:
    """R20 on whole runs. The lock is asked for before anything is read."""
    recipe, run = recipe_file(folder, "owned", steps=5000), tmp_path / "run"
    owner = start(recipe, run)
    for event in events_of(owner):
        if event["event"] == "step":
            break
    second = start(recipe, run)
    _, errors = second.communicate(timeout=WAIT)
    assert second.returncode == 2 and str(owner.pid) in errors, errors
    owner.kill()
    owner.communicate()
    third = start(recipe, run)
    assert stopped_at(third, max(checkpoints_of(run).steps(), default=0) + 2) < GRACE
    assert third.returncode == 75
