"""A finished run is trained longer when its recipe asks for more steps, as if it had been asked so from the start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from tiny_run import checkpoints_of, metrics

from trillora.errors import TrilloraError
from trillora.events import Alarm, Event, Note
from trillora.recipe.load import load_recipe
from trillora.runs.adapter import adapter_of as unfinished
from trillora.runs.manifest import read_manifest
from trillora.runs.saved import SavedRun
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1))


def recipe(folder: Path, steps: int, **train_options: Any) -> Any:
    options = {"steps": steps, "schedule": "constant", "warmup_steps": 2, "checkpoint_every": 2, **train_options}
    return load_recipe(tiny_run.recipe(folder, lora={"dropout": 0.1}, train=options))


def adapter_of(run: Path) -> bytes:
    return (run / "adapter" / "adapter_model.safetensors").read_bytes()


def test_more_steps_leave_the_adapter_of_a_run_that_had_them_from_the_start(folder: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    whole, run = tmp_path / "whole", tmp_path / "run"
    train(recipe(folder, 6), whole)
    train(recipe(folder, 3), run)
    first = adapter_of(run)
    train(recipe(folder, 6), run, listener=events.append)
    assert adapter_of(run) == adapter_of(whole) != first
    assert [line["loss"] for line in metrics(run, "step")] == [line["loss"] for line in metrics(whole, "step")]
    assert (run / "exports" / "finished-step-3" / "adapter_model.safetensors").read_bytes() == first
    manifest = read_manifest(run)
    assert manifest is not None and (manifest.num_steps, manifest.adapter.step) == (6, 6)
    assert any(isinstance(event, Note) and "is trained longer" in event.text for event in events)
    assert not any(isinstance(event, Alarm) for event in events), "the schedule is constant"
    with pytest.raises(TrilloraError, match="already contains a finished run"):
        train(recipe(folder, 6), run)


def test_a_longer_run_that_was_killed_resumes(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe(folder, 3), run)
    train(recipe(folder, 6), run)
    whole = adapter_of(run)
    shutil.rmtree(run / "adapter")  # as after a kill at step 5
    checkpoints_of(run).remove_after(4)
    (run / "saved.json").unlink()
    train(recipe(folder, 6), run)
    assert adapter_of(run) == whole


def test_the_adapter_of_a_checkpoint_does_not_replace_the_finished_one(folder: Path, tmp_path: Path) -> None:
    """A run that is trained longer was killed before its first new checkpoint, and is asked then."""
    run = tmp_path / "run"
    train(recipe(folder, 3), run)
    first = adapter_of(run)
    train(recipe(folder, 6, keep_checkpoints=9), run)
    shutil.rmtree(run / "adapter")
    checkpoints_of(run).remove_after(3)
    asked = unfinished(SavedRun.open(run)).folder
    assert asked.name == "adapter-step-3" and asked.is_dir()
    assert (run / "exports" / "finished-step-3" / "adapter_model.safetensors").read_bytes() == first


def test_a_schedule_that_was_made_for_fewer_steps_is_said(folder: Path, tmp_path: Path) -> None:
    events: list[Event] = []
    run = tmp_path / "run"
    train(recipe(folder, 3, schedule="cosine"), run)
    train(recipe(folder, 5, schedule="cosine"), run, listener=events.append)
    [alarm] = [event.text for event in events if isinstance(event, Alarm)]
    assert "followed train.schedule: cosine for 3 steps" in alarm and "at step 4 of 5" in alarm


def test_other_changes_are_refused_and_the_finished_adapter_stays(folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(recipe(folder, 3), run)
    with pytest.raises(TrilloraError, match=r"train.learning_rate was .* and is"):
        train(recipe(folder, 5, learning_rate=1e-3), run)
    with pytest.raises(TrilloraError, match="already contains a finished run"):
        train(recipe(folder, 2), run)
    assert (run / "adapter").is_dir() and not (run / "exports").exists()


def test_only_the_last_stage_is_trained_longer(folder: Path, tmp_path: Path) -> None:
    def staged(last: int, **train_options: Any) -> Any:
        values = tiny_run.recipe(folder, train={"schedule": "constant", "steps": 2, **train_options})
        data = values.pop("data")
        values["stages"] = [{"name": "first", "data": data}, {"name": "second", "data": data, "steps": last}]
        return load_recipe(values)

    run = tmp_path / "run"
    train(staged(2), run)
    with pytest.raises(TrilloraError, match="raise steps or epochs of its last stage"):
        train(staged(4, steps=3), run)  # the first stage would have been longer, too
    train(staged(4), run)
    assert [line["step"] for line in metrics(run, "step")] == [1, 2, 3, 4, 5, 6]
