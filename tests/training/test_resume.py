"""An interrupted run resumes and ends bit-identical; a run whose inputs have changed is refused.

Complete runs of a tiny model with dropout, packing, micro-batches, evaluation and two
stages.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from dose import FULL, dose, full_dose_only, log_progress
from safetensors.numpy import load
from tiny_run import assert_same, checkpoints_of, metrics

from trillora.errors import TrilloraError
from trillora.events import Alarm, Note
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import open_storage
from trillora.recipe.load import load_recipe
from trillora.training.run_process import TrainResult
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers at full dose: nothing here depends on their number."""
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=2 if FULL else 1))


def two_stages(folder: Path, num_first: int = 11, num_epochs: int = 3) -> dict[str, Any]:
    """11 steps of two micro-batches with dropout and evaluation, then three epochs of 6 steps, optimizer reset."""
    settings = tiny_run.recipe(
        folder,
        lora={"dropout": 0.1},
        train={"checkpoint_every": 4, "keep_checkpoints": 100, "schedule": "cosine"},
        evaluate={"every_steps": 5, "num_samples": 1, "max_tokens": 4},
    )
    del settings["train"]["steps"]
    data = settings.pop("data")
    first = {"name": "first", "data": {**data, "split": {"validation": 0.2, "test": 0.1}}, "steps": num_first}
    second = {"name": "second", "data": data, "epochs": num_epochs, "batch_size": 4, "optimizer_state": "restart"}
    return {**settings, "stages": [{**first, "micro_batch_size": 4}, second]}


def interrupted_at(whole: Path, step: int, run: Path) -> Path:
    """The folder of a run that was killed some steps after this checkpoint."""
    shutil.copytree(whole, run)
    shutil.rmtree(run / "adapter")
    checkpoints_of(run).remove_after(step)
    (run / "saved.json").unlink()  # it names the last checkpoint
    return run


@pytest.fixture(scope="module")
def whole(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run without interruption."""
    run = tmp_path_factory.mktemp("whole") / "run"
    result = train(load_recipe(two_stages(folder)), run)
    assert result.num_compiles == 2 and result.stopped is None
    return run


def test_run_has_its_stages_evaluations_and_checkpoints(whole: Path) -> None:
    lines = metrics(whole)
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 30))
    assert [line["stage"] for line in steps] == ["first"] * 11 + ["second"] * 18
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, 5, 10, 11]
    assert [line["step"] for line in lines if line["kind"] == "samples"] == [0, 5, 10, 11]
    assert checkpoints_of(whole).steps() == [4, 8, 11, 12, 16, 20, 24, 28, 29]
    first, second = steps[:11], steps[11:]
    # Each stage has its own schedule, and the second continues with the adapter of the first.
    assert first[0]["learning_rate"] == second[0]["learning_rate"] == pytest.approx(1e-2)
    assert second[0]["loss"] < 0.8 * first[0]["loss"]
    events = [json.loads(line)["event"] for line in (whole / "history.jsonl").read_text().splitlines()]
    assert events == ["started", "finished"]
    assert (whole / "report.html").exists() and list((whole / "tensorboard").iterdir())


@pytest.mark.parametrize("step", [4, 8, 11, 12, 16, 20, 24, 28, 29])
def test_resumed_from_any_checkpoint_it_ends_the_same(folder: Path, whole: Path, tmp_path: Path, step: int) -> None:
    """In the middle of an epoch, at its end (step 23 is the 12th of stage two), between stages, at the end. Only two of
    them without TRILLORA_DOSE=full."""
    if step not in (8, 20) and not FULL:
        pytest.skip("only with TRILLORA_DOSE=full: each is a complete run")
    run = interrupted_at(whole, step, tmp_path / "run")
    notes: list[Any] = []
    result = train(load_recipe(two_stages(folder)), run, listener=notes.append)
    assert_same(run, whole)
    assert len(result.losses) == 29
    if step < 29:
        assert any(isinstance(n, Note) and f"from step {step} of 29" in n.text for n in notes)


@full_dose_only
@pytest.mark.parametrize("part", range(4))
def test_resumed_from_every_checkpoint_of_a_hundred_steps_it_ends_the_same(
    tmp_path: Path, part: int, record_property: Callable[[str, object], None]
) -> None:
    """Each part tests a quarter of the checkpoints, so that parts can run in parallel."""
    settings = two_stages(tiny_run.write_both(tmp_path), num_first=40, num_epochs=10)
    whole = tmp_path / "whole"
    assert len(train(load_recipe(settings), whole).losses) == 100
    steps = checkpoints_of(whole).steps()
    assert len(steps) >= 25
    tested = steps[part::4][: dose(0, 100)]
    for step in tested:
        run = interrupted_at(whole, step, tmp_path / f"run-{step}")
        train(load_recipe(settings), run)
        assert_same(run, whole)
        shutil.rmtree(run)
        log_progress(f"resumed from step {step} of 100: bit-identical")
    record_property("resumed from checkpoints", len(tested))


def test_damaged_checkpoint_is_reported_and_the_one_before_used(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = interrupted_at(whole, 28, tmp_path / "run")
    file = run / "checkpoints" / "step-00000028" / "state.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    alarms: list[str] = []
    train(
        load_recipe(two_stages(folder)), run, listener=lambda e: alarms.append(e.text) if isinstance(e, Alarm) else None
    )
    assert len(alarms) == 1 and "step-00000028" in alarms[0] and "state.safetensors" in alarms[0]
    assert_same(run, whole)


def test_optimizer_state_is_reset_or_carried_over_as_the_recipe_says(folder: Path, whole: Path, tmp_path: Path) -> None:
    def moments(run: Path, step: int) -> list[np.ndarray]:
        tensors = load(checkpoints_of(run).read(step)["state.safetensors"])
        return [array for name, array in tensors.items() if "/mu/" in name]

    assert len(moments(whole, 8)) > 0 and all(array.any() for array in moments(whole, 8))
    assert not any(array.any() for array in moments(whole, 11))
    settings = two_stages(folder)
    settings["stages"][1] |= {"optimizer_state": "carry", "steps": 1, "epochs": None}
    run = interrupted_at(whole, 8, tmp_path / "run")
    train(load_recipe(settings), run, accept_changes=True)
    assert all(array.any() for array in moments(run, 11))


def refused(settings: dict[str, Any], run: Path) -> str:
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings), run)
    assert "--accept-changes" in caught.value.do
    return caught.value.what


def test_changed_inputs_are_refused_by_name(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = interrupted_at(whole, 24, tmp_path / "run")
    settings = two_stages(folder)
    settings["train"]["learning_rate"] = 5e-3
    assert "train.learning_rate was 0.01 and is 0.005" in refused(settings, run)
    settings = two_stages(folder)
    settings["stages"][1]["epochs"] = 4
    assert "stages.1.epochs was 3.0 and is 4.0" in refused(settings, run)

    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(folder, elsewhere)
    same_content = two_stages(elsewhere)
    chats = elsewhere / "chats.jsonl"
    chats.write_text(chats.read_text().replace("What is 3", "What was 3"))
    assert "first data has changed" in refused(same_content, run)
    shutil.copy(folder / "chats.jsonl", chats)
    weights = elsewhere / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "model has changed" in refused(same_content, run)
    shutil.copy(folder / "model" / "model.safetensors", weights)
    tokenizer = elsewhere / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"special": true', '"special": false', 1))
    what = refused(same_content, run)
    assert "tokenizer has changed" in what and "model" not in what
    shutil.copy(folder / "model" / "tokenizer.json", tokenizer)
    assert checkpoints_of(run).steps()[-1] == 24, "nothing was trained"

    # Files may move, and options that do not change the numbers may change.
    same_content["train"] |= {"checkpoint_every": 3, "keep_checkpoints": 50, "time_limit": "1h"}
    same_content["evaluate"]["every_steps"] = 7
    train(load_recipe(same_content), run)
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (whole / name).read_bytes()


def test_changes_are_accepted_with_accept_changes(folder: Path, whole: Path, tmp_path: Path) -> None:
    """Another seed, which needs no other program, or another rate."""
    run = interrupted_at(whole, 28, tmp_path / "run")
    settings = two_stages(folder)
    if FULL:
        settings["stages"][1]["learning_rate"] = 1e-3
    else:
        settings["train"]["seed"] = 1
    alarms: list[str] = []
    train(
        load_recipe(settings),
        run,
        accept_changes=True,
        listener=lambda e: alarms.append(e.text) if isinstance(e, Alarm) else None,
    )
    assert any(("stages.1.learning_rate" if FULL else "train.seed") in text for text in alarms)


def test_devices_may_change_between_starts(tmp_path: Path) -> None:
    """One device, then eight, then one: the same adapter, except for the order of float additions."""
    folder = tiny_run.write_both(tmp_path, tiny_run.wide_llama(num_layers=1))  # wide enough to be split

    def settings(devices: int, **train_options: Any) -> dict[str, Any]:
        options = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 9, **train_options}
        return tiny_run.recipe(folder, train=options, hardware={"devices": devices})

    plain, moved = tmp_path / "plain", tmp_path / "moved"
    train(load_recipe(settings(1)), plain)
    for devices, step in ((1, 2), (8, 4), (1, 6)):
        result = train(load_recipe(settings(devices)), moved)
        if step < 6:
            shutil.rmtree(moved / "adapter")
            checkpoints_of(moved).remove_after(step)
        assert result.num_compiles == 1
    first, same = (checkpoints_of(run).read(2)["state.safetensors"] for run in (plain, moved))
    assert first == same, "nothing differs yet"
    last, other = (load(checkpoints_of(run).read(6)["adapter_model.safetensors"]) for run in (plain, moved))
    assert not all((last[key] == other[key]).all() for key in last), "eight devices add in a different order"
    for key in last:
        # 4 Adam steps of 1e-2 with gradients that differ in the last bits.
        np.testing.assert_allclose(last[key], other[key], atol=2e-5)


def test_checkpoints_at_a_url_survive_the_machine(folder: Path, tmp_path: Path) -> None:
    """The run's folder is lost; the same command on another machine resumes from the URL."""
    settings = tiny_run.recipe(
        folder, train={"steps": 6, "checkpoint_every": 2, "checkpoint_dir": "memory://bucket/run"}
    )
    plain = tmp_path / "plain"
    train(load_recipe(tiny_run.recipe(folder, train={"steps": 6})), plain)
    train(load_recipe(settings), tmp_path / "here")
    Checkpoints(open_storage("memory://bucket/run")).remove_after(4)
    assert not (tmp_path / "here" / "checkpoints").exists()
    train(load_recipe(settings), tmp_path / "there")
    assert metrics(tmp_path / "there") == metrics(plain)
    name = "adapter/adapter_model.safetensors"
    assert (tmp_path / "there" / name).read_bytes() == (plain / name).read_bytes()


def test_finished_run_without_an_adapter_only_writes_it(folder: Path, whole: Path, tmp_path: Path) -> None:
    run = interrupted_at(whole, 29, tmp_path / "run")
    result: TrainResult = train(load_recipe(two_stages(folder)), run)
    assert result.adapter == run / "adapter" and result.num_compiles == 0
    assert_same(run, whole)
