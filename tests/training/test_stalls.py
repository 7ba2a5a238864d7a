"""A step that takes far longer than the others is reported once, with what the run is waiting for."""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny_run

from trillora.data.batches import Batches
from trillora.engine.step import StepMetrics
from trillora.events import Alarm, Event
from trillora.files.checkpoints import Checkpoints
from trillora.recipe.load import load_recipe
from trillora.training.stalls import waits, watchdog
from trillora.training.stalls.watchdog import Watchdog
from trillora.training.trainer import train
from trillora.training.validation import Evaluator

PAUSE, LIMIT = 1.6, 1.0  # seconds; a step of the tiny model takes a few hundredths


def test_names_of_waiting_functions_are_in_the_code() -> None:
    named = 0
    for wait in waits.WAITS:
        found: Any = importlib.import_module(wait.module)
        for part in filter(None, wait.function.split(".")):
            found, named = getattr(found, part), named + 1
        assert not wait.function or found.__module__ == wait.module
    assert named >= 10


def slow_at(function: Callable[..., Any], call: int) -> Callable[..., Any]:
    """The function, slow in one of its calls."""
    calls = iter(range(1, 10**6))

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        if next(calls) == call:
            time.sleep(PAUSE)
        return function(*arguments, **named)

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MIN_SECONDS", LIMIT)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
def test_slow_data_and_a_slow_step_are_reported_once_each_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step, an evaluation and a checkpoint are as slow, and normal."""
    monkeypatch.setattr(Evaluator, "measure", slow_at(Evaluator.measure, 2))
    monkeypatch.setattr(Checkpoints, "write", slow_at(Checkpoints.write, 1))
    # The data set is read whole once for the summary of its padding, so the batch is known by its step.
    batch, device_get = Batches.batch, jax.device_get
    reads = iter(range(1, 10**6))

    def slow_batch(self: Batches, step: int, *rest: Any) -> Any:
        if step == 6 and threading.current_thread() is not threading.main_thread():
            time.sleep(PAUSE)
        return batch(self, step, *rest)

    def slow_read(values: Any) -> Any:
        if isinstance(values, StepMetrics) and next(reads) in (1, 10):
            time.sleep(PAUSE)
        return device_get(values)

    monkeypatch.setattr(Batches, "batch", slow_batch)
    monkeypatch.setattr(jax, "device_get", slow_read)
    folder = tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=1))
    options = {"steps": 12, "checkpoint_every": 1, "batch_size": 2}
    recipe = load_recipe(
        tiny_run.recipe(
            folder,
            train=options,
            data={"split": {"validation": 0.2}},
            evaluate={"every_steps": 4, "num_samples": 0},
        )
    )
    events: list[Event] = []
    train(recipe, tmp_path / "run", listener=events.append)
    alarms = [event.text for event in events if isinstance(event, Alarm)]
    log = tmp_path / "run" / "stalls.log"
    assert len(alarms) == 4, alarms
    assert (
        alarms[0].startswith("Step 7 takes long: ") and "is usual. The run is waiting for the next batch" in alarms[0]
    )
    assert alarms[2].startswith("Step 10 takes long: ") and "waiting for the device to finish" in alarms[2]
    assert alarms[1] == alarms[3] == f"Stacks of all threads: {log}"
    text = log.read_text()
    assert text.count(" takes long: ") == 2
    data, step = text.split(" takes long: ")[1:]
    assert "in made_ahead" in data and "in slow_batch" in data, "the thread that builds the batch"
    assert "in slow_read" in step and "in _report" in step


def test_a_run_that_became_slow_for_good_is_reported_a_few_times() -> None:
    dog = Watchdog(lambda event: None, lambda text: None)
    dog.begin_stage(0, 10, 0.0)
    assert dog._limit() == watchdog.FIRST_SECONDS, "no median yet"
    dog.begin_stage(0, 10, peak_seconds=60.0)
    assert dog._limit() == 600, "ten times the time at peak"
    for step in range(5):
        dog._began = time.monotonic() - 20
        dog.step_ended(step, 10)
    assert dog._limit() == pytest.approx(100, rel=0.01)
    dog.step_ended(5, 20)
    assert dog._limit() == pytest.approx(200, rel=0.01), "twice the tokens"


@pytest.mark.usefixtures("quick")
def test_each_report_doubles_the_limit_and_a_step_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "MIN_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "POLL_SECONDS", 0.01)
    said: list[Event] = []
    dog = Watchdog(said.append, lambda text: None)
    dog.begin_stage(0, 1, 0.0)
    for step in range(3):
        dog._began = time.monotonic() - 0.02
        dog.step_ended(step + 1, 1)
    with dog.guarding():
        time.sleep(0.5)
    assert len(said) == 1 and dog._factor == 2 * watchdog.FACTOR
    assert isinstance(said[0], Alarm) and "Step 4" in said[0].text and "its own code on the host" in said[0].text
