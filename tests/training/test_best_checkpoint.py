"""A run ends with the best adapter that can be read, whatever became of its best checkpoint."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from dose import dose
from tiny_run import checkpoints_of

from trillora.errors import TrilloraError
from trillora.evaluation.token_metrics import TokenMetrics
from trillora.events import Alarm, ignore_events
from trillora.files.checkpoints import Checkpoints, Damaged
from trillora.files.storage import LocalStorage, open_storage
from trillora.recipe.load import load_recipe
from trillora.training.best_checkpoint import choose_checkpoint
from trillora.training.divergence import DivergenceMonitor
from trillora.training.loop import StageLoop
from trillora.training.run_folder import evaluation_losses
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]

ADAPTER = "adapter_model.safetensors"
LOSSES = {0: 9.0, 2: 3.0, 4: 1.0, 6: 2.0, 8: 2.5}  # of the evaluations, by step
STEPS = [2, 4, 6, 8]  # all are evaluated and saved
BEST, NEXT = 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("small"), tiny_run.llama(num_layers=1, width=32))


@pytest.fixture(scope="module", autouse=True)
def scripted_losses() -> Iterator[None]:
    """Which evaluation is the best must not depend on rounding."""
    judge = StageLoop._judge

    def with_loss(self: StageLoop, metrics: TokenMetrics) -> bool:
        return judge(self, replace(metrics, loss=LOSSES[self._position.step]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageLoop, "_judge", with_loss)
        yield


def recipe(folder: Path) -> dict[str, Any]:
    return tiny_run.recipe(
        folder,
        data={"validation": str(folder / "chats.jsonl")},
        train={"steps": STEPS[-1], "batch_size": 4, "checkpoint_every": 2, "keep_checkpoints": 9},
        evaluate={"every_steps": 2, "num_samples": 0},
    )


def trained(folder: Path, run: Path) -> list[str]:
    """Train, and return the alarms."""
    alarms: list[str] = []
    train(load_recipe(recipe(folder)), run, listener=lambda e: alarms.append(e.text) if isinstance(e, Alarm) else None)
    return alarms


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without faults."""
    run = tmp_path_factory.mktemp("whole") / "run"
    assert not trained(folder, run)
    assert evaluation_losses(run / "metrics.jsonl", tiny_run.metrics(run, "step")[0]["stage"]) == LOSSES
    assert adapter_step(run) == BEST and source(run)["why"] == "" and last_reason(run) == ""
    return run


def adapter_step(run: Path) -> int:
    """The step of the checkpoint that the adapter was made from."""
    found = (run / "adapter" / ADAPTER).read_bytes()
    (step,) = [step for step in readable(run) if checkpoints_of(run).read(step)[ADAPTER] == found]
    return step


def readable(run: Path) -> list[int]:
    found = []
    for step in checkpoints_of(run).steps():
        try:
            checkpoints_of(run).read(step)
            found.append(step)
        except Damaged:
            continue
    return found


def source(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())["adapter"]
    return found


def last_reason(run: Path) -> str:
    entry = json.loads((run / "history.jsonl").read_text().splitlines()[-1])
    assert entry["event"] == "finished"
    return str(entry["reason"])


def unfinished(whole: Path, run: Path) -> Path:
    """The run, killed after its last checkpoint."""
    shutil.copytree(whole, run)
    shutil.rmtree(run / "adapter")
    return run


def flip_bit(checkpoint: Path) -> None:
    data = bytearray((checkpoint / ADAPTER).read_bytes())
    data[len(data) // 2] ^= 1
    (checkpoint / ADAPTER).write_bytes(data)


def test_full_disk_at_the_best_checkpoint_makes_the_next_one_the_best(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalStorage.write

    def full_once(self: LocalStorage, name: str, files: Any) -> None:
        if name == f"step-{BEST:08d}":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        write(self, name, files)

    monkeypatch.setattr(LocalStorage, "write", full_once)
    run = tmp_path / "run"
    alarms = trained(folder, run)
    assert checkpoints_of(run).steps() == [step for step in STEPS if step != BEST]
    position = json.loads(checkpoints_of(run).read(STEPS[-1])["state.json"])["position"]
    assert position["best_step"] == adapter_step(run) == NEXT
    assert f"step {NEXT} is used, because the checkpoint of step {BEST} is missing" in last_reason(run)
    assert source(run) | {"evaluation_loss": 0} == {"step": NEXT, "evaluation_loss": 0, "why": last_reason(run)}
    assert any(f"The evaluation of step {BEST} is better" in text and "not saved" in text for text in alarms)
    assert tiny_run.metrics(run, "step") == tiny_run.metrics(whole, "step"), "the training itself is the same"


def test_evaluation_on_a_bad_step_is_saved(
    folder: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = DivergenceMonitor.observe

    def bad_at_best(self: DivergenceMonitor, step: int, loss: float, grad_norm: float, skipped: bool) -> None:
        observe(self, step, loss, grad_norm, skipped or step == BEST)

    monkeypatch.setattr(DivergenceMonitor, "observe", bad_at_best)
    assert not trained(folder, tmp_path / "run")
    assert checkpoints_of(tmp_path / "run").steps() == STEPS and adapter_step(tmp_path / "run") == BEST


@pytest.mark.parametrize("fault", ["flipped", "missing"])
def test_damaged_or_missing_best_checkpoint_is_replaced_by_the_next_best(
    folder: Path, whole: Path, tmp_path: Path, fault: str
) -> None:
    run = unfinished(whole, tmp_path / "run")
    best = run / "checkpoints" / f"step-{BEST:08d}"
    flip_bit(best) if fault == "flipped" else shutil.rmtree(best)
    alarms = trained(folder, run)
    assert adapter_step(run) == NEXT == source(run)["step"]
    assert any(f"step {BEST}" in text for text in alarms) and f"step {BEST}" in last_reason(run)


def test_without_any_other_checkpoint_the_last_weights_are_used(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = unfinished(whole, tmp_path / "run")
    for step in STEPS[:-1]:
        flip_bit(run / "checkpoints" / f"step-{step:08d}")
    alarms = trained(folder, run)
    assert adapter_step(run) == STEPS[-1]
    assert f"step {STEPS[-1]} is used, because the checkpoint of step {BEST} is damaged" in last_reason(run)
    assert alarms


def test_resumed_without_its_best_checkpoint_a_run_finds_a_new_best(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = unfinished(whole, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / f"step-{BEST:08d}")
    checkpoints_of(run).remove_after(NEXT)
    alarms = trained(folder, run)
    assert adapter_step(run) == NEXT
    assert any(f"Step {BEST} had the best evaluation, but its checkpoint is missing" in text for text in alarms)


def test_the_best_checkpoint_that_can_be_read_is_chosen(tmp_path: Path) -> None:
    """Random evaluations, of which some checkpoints are damaged, missing or were never made."""
    for seed in range(dose(20, 500)):
        generator = random.Random(seed)
        place = tmp_path / str(seed)
        checkpoints = Checkpoints(open_storage(place))
        last = generator.randrange(1, 12)
        evaluated = {
            step: generator.choice([1.0, 2.0, generator.random(), float("nan")])
            for step in range(1, last + 1)
            if generator.random() < 0.7
        }
        usable = {last}
        for step in range(1, last + 1):
            if step != last and generator.random() < 0.3:
                continue
            checkpoints.write(step, {ADAPTER: bytes([step, 0]), "state.json": b"{}"})
            if step != last and generator.random() < 0.4:
                flip_bit(place / f"step-{step:08d}")
            else:
                usable.add(step)
        alarms: list[Any] = []
        chosen = choose_checkpoint(checkpoints, evaluated, last, alarms.append)
        ranked = sorted((loss, step) for step, loss in evaluated.items() if loss == loss)
        expected = next((step for _, step in ranked if step in usable), last)
        assert chosen.step == expected and chosen.files[ADAPTER] == bytes([expected, 0])
        is_best = not ranked or ranked[0][1] == expected
        assert is_best == (not chosen.why) == (not alarms)


def test_a_lost_connection_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is not finished with other weights; the same command tries again."""
    checkpoints = Checkpoints(open_storage(tmp_path))
    for step in (1, 2):
        checkpoints.write(step, {ADAPTER: b"a"})

    def unreachable(self: LocalStorage, name: str, files: Any = None) -> dict[str, bytes]:
        raise OSError("the store does not answer")

    monkeypatch.setattr(LocalStorage, "read", unreachable)
    with pytest.raises(TrilloraError, match="does not answer"):
        choose_checkpoint(checkpoints, {1: 1.0}, 2, ignore_events)
