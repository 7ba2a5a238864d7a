"""Runs as processes: killed at any time, stopped by signals, without a terminal, and started twice.

With the real command line. Starting a process takes seconds, so few are started here;
TRILLORA_DOSE=full makes 200 kills and sends 40 signals.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from dose import FULL, dose, full_dose_only, log_progress
from run_process import WAIT, check_all_readable, events_of, finish, interrupt_often, leftovers, start
from tiny_run import assert_same, checkpoints_of, metrics
from warm_process import WarmRun

from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

NUM_STEPS = 80 if FULL else 40
NUM_RUNS = dose(1, 8)  # the kills are divided among them, so that tests can run in parallel
NUM_KILLS = -(-dose(2, 200) // NUM_RUNS)
EVALUATE_EVERY = 20
SAVE_EVERY = 5
GRACE = 10.0  # seconds from a signal to the end of the process that we guarantee
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With enough evaluation rows that an evaluation can be interrupted."""
    folder = tiny_run.write_both(tmp_path_factory.mktemp("small"), tiny_run.llama(num_layers=1, width=32))
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


def stopped_at(process: subprocess.Popen[str] | WarmRun, step: int) -> float:
    """Seconds from SIGTERM, sent after this step, to the end of the process. A second signal follows."""
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
    run = tmp_path_factory.mktemp("whole") / "run"
    train(load_recipe(recipe_file(folder, "whole")), run)
    return run


@pytest.mark.parametrize("seed", range(NUM_RUNS))
def test_killed_at_random_times_a_run_ends_like_an_uninterrupted_one(
    folder: Path, tmp_path: Path, seed: int, request: pytest.FixtureRequest, record_property: Record
) -> None:
    """Some kills come before the first step, some during a save. No incomplete checkpoint is ever visible."""
    recipe = recipe_file(folder, f"killed-{seed}", seed=seed)
    whole = request.getfixturevalue("whole") if seed == 0 else finish(recipe, tmp_path / "whole")
    generator = random.Random(seed)
    kills: Counter[str] = Counter()

    def kill(process: subprocess.Popen[str] | WarmRun, run: Path) -> bool:
        seen = _wait_at_random(process, generator)
        process.kill()
        process.communicate()
        if process.returncode != -signal.SIGKILL:
            return False  # it had already finished
        place = "during a save" if leftovers(run) else "between steps" if seen else "before the first step"
        kills[place] += 1
        check_all_readable(run)
        log_progress(f"run {seed}: kill {kills.total()} of {NUM_KILLS} {place}")
        return True

    runs = interrupt_often(recipe, tmp_path, NUM_KILLS, kill, begin=WarmRun)  # 200 starts would import for half an hour
    for run in runs:
        assert_same(run, whole)
        assert not leftovers(run)
        assert len(checkpoints_of(run).steps()) <= 3, "two, and one that is being removed"
    assert kills.total() == NUM_KILLS
    assert kills["before the first step"] < NUM_KILLS, "some hit the training"
    record_property("kills", NUM_KILLS)
    for place, number in kills.items():
        record_property(place, number)
    record_property("runs compared", len(runs))


def _wait_at_random(process: subprocess.Popen[str] | WarmRun, generator: random.Random) -> bool:
    """Wait for a random time after the start, or shortly after a random step or save. True if a step was seen."""
    wait = generator.choice(["start", "step", "saved", "step"])
    if wait == "start":
        time.sleep(generator.uniform(0.1, 6.0))
        return False
    num_events, seen = generator.randrange(1, 8 if wait == "step" else 3), False
    for event in events_of(process):
        seen = seen or event["event"] == "step"
        num_events -= event["event"] == wait
        if num_events <= 0:
            break
    time.sleep(generator.uniform(0.0, 0.05))
    return seen


def test_stop_signal_saves_and_sets_the_exit_code(folder: Path, whole: Path, tmp_path: Path) -> None:
    """During training, then during compilation. Further signals do no harm. The chain of kernels in
    test_notebooks.py stops a process that was not forked."""
    recipe, run = recipe_file(folder, "stopped"), tmp_path / "run"
    process: subprocess.Popen[str] | WarmRun = (start if FULL else WarmRun)(recipe, run)
    assert stopped_at(process, 7) < GRACE
    assert process.returncode == 75
    (last,) = checkpoints_of(run).steps()[-1:]
    assert last >= 7 and last == metrics(run)[-1]["step"]
    before = (run / "metrics.jsonl").read_bytes() + b'{"kind": "step", "lo'  # a kill may leave half a line
    (run / "metrics.jsonl").write_bytes(before)

    process = WarmRun(recipe, run)
    for event in events_of(process):
        if event["event"] == "note" and event["text"].startswith("Compiling the training step"):
            break
    sent = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT)
    assert time.monotonic() - sent < GRACE and process.returncode == 75
    assert checkpoints_of(run).steps()[-1] == last and (run / "metrics.jsonl").read_bytes() == before

    finish(recipe, run, WarmRun)
    assert_same(run, whole)
    events = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    assert [e["event"] for e in events] == ["started", "stopped", "resumed", "finished"]
    # Python runs the handlers of pending signals in numeric order: on a busy machine, the second signal comes first.
    assert events[1]["reason"] in ("SIGTERM", "SIGINT")


@full_dose_only
@pytest.mark.parametrize("seed", [1, 2])
def test_signals_during_evaluation_and_save_lose_nothing(
    folder: Path, whole: Path, tmp_path: Path, seed: int, record_property: Record
) -> None:
    """With SIGHUP, too, the signal of a closed terminal. The event of a step comes before its evaluation and
    save."""
    generator = random.Random(seed)
    num_signals = max(2, dose(4, 40) // 2)
    hit: Counter[str] = Counter()
    slowest = 0.0

    def interrupt(process: subprocess.Popen[str], run: Path) -> bool:
        nonlocal slowest
        phase = ["evaluation", "save"][(hit["evaluation"] + hit["save"]) % 2]
        every = EVALUATE_EVERY if phase == "evaluation" else SAVE_EVERY
        for event in events_of(process):
            if event["event"] == "step" and event["step"] % every == 0:
                break
        sent = time.monotonic()
        process.send_signal(generator.choice([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
        if generator.random() < 0.5:
            time.sleep(generator.uniform(0, 0.1))
            process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT)
        if process.returncode == 0:
            return False  # it was the last step, and the run finished
        assert process.returncode == 75, errors
        slowest = max(slowest, time.monotonic() - sent)
        last = checkpoints_of(run).steps()[-1]
        assert last == metrics(run, "step")[-1]["step"], "no step was lost"
        evaluated = {line["step"] for line in metrics(run, "evaluation")}
        hit["evaluations abandoned"] += last % EVALUATE_EVERY == 0 and last not in evaluated
        hit[phase] += 1
        check_all_readable(run)
        log_progress(f"signal {hit['evaluation'] + hit['save']} of {num_signals} during {phase}")
        return True

    for run in interrupt_often(recipe_file(folder, "signals"), tmp_path, num_signals, interrupt):
        assert_same(run, whole)
    assert slowest < GRACE
    assert hit["evaluations abandoned"] >= 1
    record_property("signals", num_signals)
    record_property("evaluations abandoned", hit["evaluations abandoned"])
    record_property("slowest end, s", round(slowest, 2))


@full_dose_only
def test_run_continues_when_its_output_is_closed(folder: Path, whole: Path, tmp_path: Path) -> None:
    """The terminal or notebook that showed it is closed."""
    process = start(recipe_file(folder, "unread"), tmp_path / "run", stderr=subprocess.DEVNULL)
    for event in events_of(process):
        if event["event"] == "step":
            break
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=WAIT) == 0
    assert_same(tmp_path / "run", whole)


@full_dose_only
def test_second_process_is_refused_and_a_dead_owner_is_replaced(folder: Path, tmp_path: Path) -> None:
    """The run takes the lock before it reads anything."""
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


@pytest.mark.parametrize(("has_stopped", "code"), [(True, 75), (False, -signal.SIGTERM)])
def test_a_signal_after_the_run_was_stopped_does_not_change_the_exit_code(has_stopped: bool, code: int) -> None:
    program = f"""
import os, signal, sys
from trillora.training.signals import Stop, ignore_after_stop
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored under nohup
ignore_after_stop()
stop = Stop()
with stop.listening():
    stop.begin_training()
    if {has_stopped}:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.signalled == "SIGHUP"
os.kill(os.getpid(), signal.SIGTERM)  # the handlers of the run are gone
sys.exit(75)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == code
