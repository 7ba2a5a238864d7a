"""A run announces the programs it compiles. During training it compiles nothing else, and a changed shape stops it."""

from __future__ import annotations

import contextlib
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from dose import slow_case

from trillora.data.batches import Batches
from trillora.devices.mesh import put_batch
from trillora.events import Note, Step
from trillora.recipe.load import load_recipe
from trillora.step.compile_guard import COMPILE_EVENTS, CompileWatch, Planned, UnplannedProgram, describe
from trillora.training import loop, validation
from trillora.training.trainer import train

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1, width=32))


def two_stages(folder: Path) -> dict[str, Any]:
    """A stage with length buckets, evaluation and samples, then one with packing; checkpoints in both."""
    settings = tiny_run.recipe(
        folder,
        train={"checkpoint_every": 2, "keep_checkpoints": 100},
        evaluate={"every_steps": 2, "num_samples": 3, "max_tokens": 4},
    )
    del settings["train"]["steps"]
    data = settings.pop("data")
    first = {**data, "split": {"validation": 0.3}, "pack": False, "num_length_buckets": 3}
    return {
        **settings,
        "stages": [
            {"name": "raw", "data": first, "steps": 6, "micro_batch_size": 4},
            {"name": "chat", "data": data, "steps": 3, "batch_size": 4, "optimizer_state": "restart"},
        ],
    }


@contextlib.contextmanager
def counting_compiles() -> Iterator[Counter[str]]:
    """Function name -> how often it is compiled."""
    names: Counter[str] = Counter()

    def count(event: str, seconds: float, **facts: Any) -> None:
        if event == COMPILE_EVENTS[1]:
            names[re.sub(r"^jit[_(](.*?)\)?$", r"\1", str(facts["fun_name"]))] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@dataclass(frozen=True)
class Watched:
    """A run of two stages, its events, and what it compiled."""

    run: Path
    events: list[Any]
    compiled: Counter[str]


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    events: list[Any] = []
    run = tmp_path_factory.mktemp("whole") / "run"
    with counting_compiles() as compiled:
        train(load_recipe(two_stages(folder)), run, listener=events.append)
    return Watched(run, events, compiled)


def test_plan_names_the_programs_that_are_then_compiled(whole: Watched) -> None:
    (plan,) = [e.text for e in whole.events if isinstance(e, Note) and "programs are compiled" in e.text]
    assert plan == (
        "9 programs are compiled: the state before the first step; 2 for the step of stage raw (8 x 48, 8 x 64); the "
        "evaluation of stage raw (4 x 64); 2 for the answers of stage raw (prompts of up to 48 tokens, read and "
        "answered); the state at the end of stage raw; the step of stage chat (4 x 64); the copy of the state for a "
        "checkpoint"
    )
    assert whole.events.index(Note(plan)) < next(i for i, e in enumerate(whole.events) if isinstance(e, Step))
    expected = {"first_state": 1, "train_step": 3, "eval_step": 1, "read": 1, "write": 1, "next_state": 1, "copy": 1}
    assert {name: whole.compiled[name] for name in expected} == expected and sum(expected.values()) == 9


@pytest.mark.parametrize("step", [slow_case(2), 6])
def test_resumed_run_stays_within_its_plan(folder: Path, whole: Watched, tmp_path: Path, step: int) -> None:
    """Step 2: its first answers, which compile their programs, come in the middle of a stage. Step 6: it starts with
    the second stage."""
    run = tmp_path / "run"
    shutil.copytree(whole.run, run)
    shutil.rmtree(run / "adapter")
    tiny_run.checkpoints_of(run).remove_after(step)
    train(load_recipe(two_stages(folder)), run)
    tiny_run.assert_same(run, whole.run)


def change_batches(monkeypatch: pytest.MonkeyPatch, change: Any, at_step: int) -> None:
    """Change the batches from this step on."""
    make = Batches.batch

    def changed(self: Batches, step: int, places: Any = None) -> Any:
        batch = make(self, step, places)
        return batch if step < at_step else change(batch)

    monkeypatch.setattr(Batches, "batch", changed)


def test_batch_of_another_shape_stops_the_run_and_it_can_resume(folder: Path, tmp_path: Path) -> None:
    settings = load_recipe(tiny_run.recipe(folder, train={"checkpoint_every": 1}))
    with pytest.MonkeyPatch.context() as patched, counting_compiles() as compiled:
        change_batches(patched, lambda batch: {name: array[:, :48] for name, array in batch.items()}, at_step=2)
        with pytest.raises(UnplannedProgram) as caught:
            train(settings, tmp_path / "run")
    error = caught.value
    assert "got a batch of 8 x 48" in error.what and "compiled: 8 x 64" in error.what
    assert "The step of stage" in str(error.where) and "resumes from the last checkpoint" in error.do
    assert compiled["train_step"] == 1
    assert tiny_run.checkpoints_of(tmp_path / "run").steps() == [1, 2]
    assert len(train(settings, tmp_path / "run").losses) == 4


def test_a_single_array_of_another_shape_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the compiled program itself can detect this."""
    change_batches(monkeypatch, lambda batch: {**batch, "targets": batch["targets"][:, :48]}, at_step=2)
    with pytest.raises(UnplannedProgram, match=r"int32\[8,48\]"):
        train(load_recipe(tiny_run.recipe(folder)), tmp_path / "run")


def test_evaluation_of_another_shape_stops_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny_run.recipe(folder, data={"split": {"validation": 0.3}}, evaluate={"num_samples": 0})
    monkeypatch.setattr(validation.Evaluator, "_placed", lambda self, n: put_batch(whole_batch(self), self._mesh))
    with pytest.raises(UnplannedProgram) as caught:
        train(load_recipe(settings), tmp_path / "run")
    assert "The evaluation of stage" in caught.value.what and "a batch of 9 x 64" in caught.value.what


def whole_batch(evaluator: Any) -> Any:
    batch = evaluator.batches.batch(0)
    return {name: np.concatenate([array, array])[:9] for name, array in batch.items()}


def test_program_outside_the_plan_is_stopped_before_it_is_compiled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is patched to compute a running mean over an array that grows in every step."""
    seen: list[float] = []

    @jax.jit
    def running_mean(values: jax.Array) -> jax.Array:
        return values.mean()

    for length in (1, 2):
        running_mean(np.ones(length, np.float32))

    def memory(*_: Any) -> float:
        seen.append(1.0)
        return float(running_mean(np.array(seen, np.float32)))

    monkeypatch.setattr(loop, "peak_memory_gib", memory)
    with counting_compiles() as compiled, pytest.raises(UnplannedProgram) as caught:
        train(load_recipe(tiny_run.recipe(folder, train={"steps": 9})), tmp_path / "run")
    error = caught.value
    # Metrics of step 3 are read while step 4 runs.
    assert len(seen) == 3 and "running_mean" in error.what and "float32[3]" in error.what
    assert "step 4 of stage" in error.what and "8 x 64" in error.what
    assert str(error.where).startswith("trillora.training.loop, line ")
    assert not compiled["running_mean"]


def test_listener_may_compute_with_jax(folder: Path, tmp_path: Path) -> None:
    means: list[float] = []

    def listener(event: Any) -> None:
        if isinstance(event, Step):
            means.append(float(jnp.full(event.step, event.loss).mean()))

    train(load_recipe(tiny_run.recipe(folder)), tmp_path / "run", listener=listener)
    assert len(means) == 4


def test_guard_checks_only_its_thread_and_only_while_it_is_active() -> None:
    watch = CompileWatch()

    def compile_one(value: float) -> float:
        return float(jax.jit(lambda x: x + value)(np.float32(1)))

    watch.doing = "a test"
    with watch.watching():
        with pytest.raises(UnplannedProgram, match="during a test"):
            compile_one(1)
        other = threading.Thread(target=compile_one, args=(2,))
        other.start()
        other.join()
        with watch.allowing(), watch.allowing():
            compile_one(3)
        with pytest.raises(UnplannedProgram):
            compile_one(4)
    compile_one(5)


def test_plan_counts_and_describes_programs() -> None:
    parts = [Planned("the step of stage raw", 2, "8 x 32, 8 x 64"), Planned("the copy of the state")]
    assert describe(parts) == (
        "3 programs are compiled: 2 for the step of stage raw (8 x 32, 8 x 64); the copy of the state"
    )
