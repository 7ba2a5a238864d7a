"""A run ends with the adapter of its best evaluation, whatever became of its checkpoints."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiny_run import checkpoints_of

from trillora.engine.step import TrainState
from trillora.evaluation.token_metrics import TokenMetrics
from trillora.events import Alarm
from trillora.files.storage import LocalStorage
from trillora.recipe.load import load_recipe
from trillora.training.divergence import DivergenceMonitor
from trillora.training.loop import EntryLoop
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]

ADAPTER = "adapter_model.safetensors"
LOSSES = {0: 9.0, 2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}  # of the evaluations, by step
STEPS = [2, 4, 6, 8]  # all are evaluated and saved
BEST = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("small"), tiny_run.llama(num_layers=1, width=32))


@pytest.fixture(scope="module", autouse=True)
def scripted_losses() -> Iterator[None]:
    """Which evaluation is the best must not depend on rounding."""
    judge = EntryLoop._judge

    def with_loss(self: EntryLoop, state: TrainState, number: int, metrics: TokenMetrics) -> None:
        judge(self, state, number, replace(metrics, loss=LOSSES[self._position.step]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EntryLoop, "_judge", with_loss)
        yield


def recipe(folder: Path, **evaluate: Any) -> dict[str, Any]:
    return tiny_run.recipe(
        folder,
        data={"validation": str(folder / "chats.jsonl")},
        train={"steps": STEPS[-1], "batch_size": 4, "checkpoint_every": 2, "keep_checkpoints": 9},
        evaluate={"every_steps": 2, "num_samples": 0, **evaluate},
    )


def trained(folder: Path, run: Path, **evaluate: Any) -> list[str]:
    """Train, and return the alarms."""
    alarms: list[str] = []
    values = load_recipe(recipe(folder, **evaluate))
    train(values, run, listener=lambda e: alarms.append(e.text) if isinstance(e, Alarm) else None)
    return alarms


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without faults."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert not trained(folder, run)
    assert {line["step"]: line["loss"] for line in tiny_run.metrics(run, "evaluation")} == LOSSES
    assert source(run) == {"step": BEST, "evaluation_loss": LOSSES[BEST]}
    return run


def adapter(run: Path) -> bytes:
    return (run / "adapter" / ADAPTER).read_bytes()


def in_checkpoint(run: Path, step: int) -> bytes:
    return checkpoints_of(run).read(step)[ADAPTER]


def source(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())["adapter"]
    return found


def unfinished(whole: Path, run: Path, last: int) -> Path:
    """The run, killed after a checkpoint."""
    tiny_run.copy_interrupted(whole, run, last)
    return run


def test_every_checkpoint_has_the_best_adapter_so_far(whole: Path) -> None:
    assert in_checkpoint(whole, 2) != in_checkpoint(whole, BEST)
    assert adapter(whole) == in_checkpoint(whole, BEST) == in_checkpoint(whole, 6) == in_checkpoint(whole, 8)


def test_without_keep_best_the_last_weights_are_the_adapter(folder: Path, whole: Path, tmp_path: Path) -> None:
    trained(folder, tmp_path / "run", keep_best=False)
    assert adapter(tmp_path / "run") == in_checkpoint(tmp_path / "run", STEPS[-1]) != adapter(whole)
    assert source(tmp_path / "run")["step"] == STEPS[-1]


def test_a_full_disk_at_the_best_checkpoint_changes_nothing(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalStorage.write

    def full_once(self: LocalStorage, name: str, files: Any) -> None:
        if name == f"step-{BEST:08d}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        write(self, name, files)

    monkeypatch.setattr(LocalStorage, "write", full_once)
    run = tmp_path / "run"
    [alarm] = trained(folder, run)
    assert f"step {BEST} could not be saved" in alarm
    assert checkpoints_of(run).steps() == [step for step in STEPS if step != BEST]
    assert adapter(run) == adapter(whole) and tiny_run.metrics(run) == tiny_run.metrics(whole)


def test_evaluation_on_a_bad_step_is_used(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = DivergenceMonitor.observe

    def bad_at_best(self: DivergenceMonitor, step: int, loss: float, grad_norm: float, skipped: bool) -> None:
        observe(self, step, loss, grad_norm, skipped or step == BEST)

    monkeypatch.setattr(DivergenceMonitor, "observe", bad_at_best)
    assert not trained(folder, tmp_path / "run")
    assert checkpoints_of(tmp_path / "run").steps() == STEPS and adapter(tmp_path / "run") == adapter(whole)


@pytest.mark.parametrize("last", [2, 6, 8])
def test_resumed_without_its_best_checkpoint_a_run_ends_the_same(
    folder: Path, whole: Path, tmp_path: Path, last: int
) -> None:
    """Before the best evaluation, after it, and when only the adapter was not written yet."""
    run = unfinished(whole, tmp_path / "run", last)
    shutil.rmtree(run / "checkpoints" / f"step-{BEST:08d}", ignore_errors=True)
    assert not trained(folder, run)
    assert adapter(run) == adapter(whole) and source(run) == source(whole)


def test_a_damaged_last_checkpoint_is_repeated(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = unfinished(whole, tmp_path / "run", STEPS[-1])
    data = bytearray((run / "checkpoints" / f"step-{STEPS[-1]:08d}" / ADAPTER).read_bytes())
    data[len(data) // 2] ^= 1
    (run / "checkpoints" / f"step-{STEPS[-1]:08d}" / ADAPTER).write_bytes(data)
    assert len(trained(folder, run)) == 1
    assert adapter(run) == adapter(whole)
