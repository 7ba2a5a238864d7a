"""Complete runs under faults: values that are not finite, divergence, full disks, short time limits."""

from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from dose import full_dose_only
from safetensors.numpy import load, load_file, save_file

from trillora.errors import TrilloraError
from trillora.events import Alarm, Evaluated, Skipped, Step
from trillora.files.checkpoints import Checkpoints
from trillora.files.storage import LocalStorage, open_storage
from trillora.recipe.load import load_recipe
from trillora.training.divergence import DivergenceMonitor
from trillora.training.loop import Diverged
from trillora.training.run_folder import RunFolder, read_lines
from trillora.training.signals import Interrupted
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1))


def checkpoints_of(run: Path) -> Checkpoints:
    return Checkpoints(open_storage(run / "checkpoints"))


def lines(run: Path, kind: str) -> list[dict[str, Any]]:
    found = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


@pytest.fixture(scope="module")
def broken(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and the chats, with one token whose embedding is infinite and one row that contains it."""
    from transformers import AutoTokenizer

    place = tmp_path_factory.mktemp("broken")
    tiny_run.write_both(place, tiny_run.llama(num_layers=1))
    token = AutoTokenizer.from_pretrained(place / "model")("€", add_special_tokens=False)["input_ids"][-1]
    weights = load_file(place / "model" / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["model.embed_tokens.weight"][token, 0] = np.inf
    save_file(weights, place / "model" / "model.safetensors", metadata={"format": "pt"})
    chats = (place / "chats.jsonl").read_text().splitlines()
    chats[4] = chats[4].replace("What is", "What € is")
    (place / "chats.jsonl").write_text("\n".join(chats) + "\n", "utf-8")
    return place


@pytest.mark.parametrize(("steps", "max_bad_steps"), [(20, 3), (3, 10)])
def test_batch_with_a_non_finite_loss_is_skipped_and_its_rows_are_named(
    broken: Path, tmp_path: Path, steps: int, max_bad_steps: int
) -> None:
    """The embedding is tied to the head, so its infinite value affects the logit of that token everywhere: every
    loss is not finite, and every step must be skipped. A run that is too short to reach the limit has diverged, too."""
    options = {"steps": steps, "checkpoint_every": 1, "max_bad_steps": max_bad_steps, "batch_size": 2}
    settings = tiny_run.recipe(broken, train=options)
    alarms: list[str] = []
    with pytest.raises(Diverged) as caught:
        train(
            load_recipe(settings),
            tmp_path / "run",
            listener=lambda e: alarms.append(e.text) if isinstance(e, Alarm | Skipped) else None,
        )
    skipped = lines(tmp_path / "run", "skipped")
    assert len(skipped) == 3 and all("chats.jsonl:" in row for line in skipped for row in line["rows"])
    assert len(alarms) == 3 and "3 steps in a row" in caught.value.what
    for step in checkpoints_of(tmp_path / "run").steps():
        files = checkpoints_of(tmp_path / "run").read(step)
        for name in ("adapter_model.safetensors", "state.safetensors"):
            assert all(np.isfinite(a).all() for a in load(files[name]).values() if a.dtype.kind == "f")


def test_learning_rate_of_a_million_stops_with_the_last_good_state(folder: Path, tmp_path: Path) -> None:
    """Ten good steps, then an absurd learning rate: good checkpoints stay, later ones are removed."""
    run = tmp_path / "run"
    good = tiny_run.recipe(folder, train={"steps": 10, "checkpoint_every": 5})
    settings = {**good, "stages": [{"name": "good", "data": good["data"], "steps": 10}]}
    settings["stages"].append({"name": "absurd", "data": good["data"], "steps": 60, "learning_rate": 1e6})
    del settings["data"]
    settings["train"] = {**settings["train"], "steps": None, "checkpoint_every": 1, "max_bad_steps": 5}
    with pytest.raises(Diverged) as caught:
        train(load_recipe(settings), run)
    assert caught.value.exit_code == 76 and "1e+06" in caught.value.do
    steps = checkpoints_of(run).steps()
    assert steps == [10] or steps == [9, 10]
    assert "step-00000010" in caught.value.what
    assert len(lines(run, "step")) < 20, "it stopped soon"
    assert not (run / "adapter").exists() and (run / "report.html").exists()
    assert json.loads((run / "history.jsonl").read_text().splitlines()[-1])["event"] == "diverged"
    losses = [line["loss"] for line in lines(run, "step")][:10]
    assert losses[-1] < losses[0]


@full_dose_only
def test_absurd_learning_rate_from_the_start_leaves_no_checkpoint(tmp_path: Path) -> None:
    """This model diverges in its first step; the small one takes two."""
    config = tiny_run.wide_llama()
    config.num_hidden_layers = 3
    folder = tiny_run.write_both(tmp_path, config)
    settings = tiny_run.recipe(
        folder, train={"steps": 60, "learning_rate": 1e6, "checkpoint_every": 1, "max_bad_steps": 4}
    )
    with pytest.raises(Diverged) as caught:
        train(load_recipe(settings), tmp_path / "run")
    assert "no good checkpoint" in caught.value.what and checkpoints_of(tmp_path / "run").steps() == []


@pytest.mark.parametrize("seed", range(10))
def test_divergence_monitor_accepts_noisy_losses_and_detects_divergence(seed: int) -> None:
    """The rule itself: noisy falling losses with single outliers are accepted."""
    generator = np.random.default_rng(seed)
    monitor = DivergenceMonitor(math.log(50_000))
    for step in range(1, 2001):
        loss = 1.5 + 2.5 * math.exp(-step / 300) + generator.normal(0, 0.4) + (4 if generator.random() < 0.01 else 0)
        monitor.observe(step, loss, 0.5, skipped=bool(generator.random() < 0.005))
        assert monitor.num_bad < 4
    restored = DivergenceMonitor(**json.loads(json.dumps(asdict(monitor))))
    assert restored == monitor
    for step in range(2001, 2011):
        monitor.observe(step, 9.0 + generator.normal(0, 0.5), 0.5, skipped=False)
    assert monitor.num_bad >= 10 and monitor.first_bad is not None and monitor.first_bad >= 1999


def test_full_disk_does_not_stop_the_training(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for the second of four checkpoints; the run continues and keeps the other three."""
    write = LocalStorage.write

    def fails_once(self: LocalStorage, name: str, files: Any) -> None:
        if name == "step-00000004":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        write(self, name, files)

    monkeypatch.setattr(LocalStorage, "write", fails_once)
    alarms: list[str] = []
    settings = tiny_run.recipe(folder, train={"steps": 8, "checkpoint_every": 2, "keep_checkpoints": 9})
    result = train(
        load_recipe(settings),
        tmp_path / "run",
        listener=lambda e: alarms.append(e.text) if isinstance(e, Alarm) else None,
    )
    assert result.adapter is not None and checkpoints_of(tmp_path / "run").steps() == [2, 6, 8]
    assert len(alarms) == 1 and "No space left" in alarms[0] and "step 2" in alarms[0]


def test_run_without_its_last_checkpoint_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: LocalStorage, name: str, files: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    monkeypatch.setattr(LocalStorage, "write", full)
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(tiny_run.recipe(folder, train={"steps": 2})), tmp_path / "run")
    assert "could not be saved" in caught.value.what and "same command" in caught.value.do


def test_time_limit_shorter_than_a_step_trains_one_step_per_start(folder: Path, tmp_path: Path) -> None:
    settings = tiny_run.recipe(folder, train={"steps": 3, "time_limit": "0s"})
    seen = []
    for _ in range(3):
        result = train(load_recipe(settings), tmp_path / "run")
        seen.append((len(result.losses), result.stopped))
    assert seen == [(1, "the time limit"), (2, "the time limit"), (3, None)]
    plain = train(load_recipe(tiny_run.recipe(folder, train={"steps": 3})), tmp_path / "plain")
    assert result.losses == plain.losses


def test_stage_without_rows_is_an_error_with_its_name(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    settings = tiny_run.recipe(folder)
    data = settings.pop("data")
    settings["stages"] = [{"name": "full", "data": data}, {"name": "empty", "data": str(tmp_path / "empty.jsonl")}]
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings), tmp_path / "run")
    assert "stage empty" in str(caught.value) or "empty.jsonl" in str(caught.value)


def test_best_evaluation_is_kept_and_patience_ends_a_stage(folder: Path, tmp_path: Path) -> None:
    """Training memorizes four rows: the loss of other rows falls, then rises."""
    few, others = tmp_path / "few.jsonl", tmp_path / "others.jsonl"
    rows = (folder / "chats.jsonl").read_text().splitlines()
    few.write_text("\n".join(rows[:4]) + "\n")
    others.write_text("\n".join(rows[4:]) + "\n")
    settings = tiny_run.recipe(
        folder,
        data={"path": str(few), "validation": str(others)},
        train={"steps": 200, "batch_size": 4, "learning_rate": 3e-2},
        evaluate={"every_steps": 5, "num_samples": 0, "patience": 3},
    )
    events: list[Any] = []
    train(load_recipe(settings), tmp_path / "run", listener=events.append)
    evaluated = [e for e in events if isinstance(e, Evaluated)]
    best = min(evaluated[1:], key=lambda e: e.loss)
    assert evaluated[-1].step == best.step + 15 < 200, "three evaluations without a better loss"
    assert [e.is_best for e in evaluated[1:]].count(True) >= 2 and not evaluated[0].is_best
    assert max(e.step for e in events if isinstance(e, Step)) == evaluated[-1].step
    kept = (tmp_path / "run/adapter/adapter_model.safetensors").read_bytes()
    checkpoints = checkpoints_of(tmp_path / "run")
    assert kept == checkpoints.read(checkpoints.steps()[-1])["adapter_model.safetensors"]
    source = json.loads((tmp_path / "run" / "run.json").read_text())["adapter"]
    assert source == {"step": best.step, "evaluation_loss": pytest.approx(best.loss)}


def test_half_a_line_of_metrics_does_not_hide_the_exit_code(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process may leave half a line. A signal before the first step still stops the run as documented."""

    def interrupted(self: Any) -> None:
        raise Interrupted("SIGTERM")

    monkeypatch.setattr("trillora.training.trainer._Training.run", interrupted)
    step = b'{"kind": "step", "loss": 1.5}\n'
    for rest in (b'{"kind": "st', b'{"kind": "step", "loss', b'{"kind": "step"}', b"\xff\x00\n", b"[" * 9999, b"[]\n"):
        (tmp_path / "metrics.jsonl").write_bytes(step + step + rest)
        result = train(load_recipe(tiny_run.recipe(folder)), tmp_path)
        assert result.stopped == "SIGTERM" and result.losses[:2] == (1.5, 1.5)


def test_history_continues_after_half_a_line(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    file.write_text('{"event": "started"}\n{"event": "res')
    RunFolder(tmp_path).add_history("resumed", 3)
    assert [line["event"] for line in read_lines(file)] == ["started", "resumed"]


@pytest.mark.parametrize("place", ["a-file", "a-file/inside"])
def test_checkpoint_dir_that_is_a_file_is_an_error_that_names_it(folder: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "a-file").write_text("")
    settings = tiny_run.recipe(folder, train={"checkpoint_dir": str(tmp_path / place)})
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings), tmp_path / "run")
    assert "a-file" in f"{caught.value.what} {caught.value.where}" and caught.value.do


def test_store_that_does_not_answer_is_an_error_that_names_it(folder: Path, tmp_path: Path) -> None:
    settings = tiny_run.recipe(folder, train={"checkpoint_dir": "webhdfs://127.0.0.1:9/x"})
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(settings), tmp_path / "run")
    assert caught.value.where == "webhdfs://127.0.0.1:9/x" and caught.value.do
