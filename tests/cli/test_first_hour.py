"""From a data file to answers: `trillora train FILE`, what a run says at its end, and the recipe that it leaves."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import tiny_run
from typer.testing import CliRunner, Result

from trillora.cli import app
from trillora.recipe.load import load_recipe
from trillora.report.run.next_steps import after_stop, after_training
from trillora.training.signals import Stop

OPTIONS = [
    "lora.rank=4",
    "train.sequence_length=64",
    "train.steps=2",
    "train.learning_rate=1e-2",
    "hardware.devices=1",
]


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1, width=32))


@pytest.fixture(scope="module")
def finished(folder: Path) -> tuple[Path, str]:
    run = folder / "runs" / "chats"
    result = invoke("train", folder / "chats.jsonl", *OPTIONS, "--model", folder / "model", "--out", run)
    assert result.exit_code == 0, result.output
    return run, result.output


def test_a_data_file_and_a_model_train_a_run(folder: Path, finished: tuple[Path, str]) -> None:
    run, _ = finished
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    assert len(tiny_run.losses(run)) == 2
    head, *rest = (run / "recipe.yaml").read_text().splitlines()
    assert head == "# Made of chats.jsonl. docs/recipes.md has all options."
    assert rest[:2] == [f"model: {folder / 'model'}", f"data: {folder / 'chats.jsonl'}"]
    recipe = load_recipe(run / "recipe.yaml")
    assert (recipe.lora.rank, recipe.train.steps) == (4, 2)


def test_the_end_of_a_run_names_its_files_and_the_next_commands(finished: tuple[Path, str]) -> None:
    run, output = finished
    lines = [line.split(maxsplit=1) for line in output.splitlines()[-5:]]
    assert [line[0] for line in lines] == ["Recipe", "Report", "Ask", "Measure", "Export"]
    assert lines[0][1] == str(run / "recipe.yaml") and lines[1][1] == str(run / "report.html")
    assert f"trillora chat {run}" in output and f"trillora export {run} --to merged" in output


def test_a_run_that_is_stopped_says_with_which_command_it_resumes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stop, "reason", lambda self, next_seconds=0.0: signal.SIGTERM.name)
    run = tmp_path / "run"
    words = ["train", folder / "chats.jsonl", *OPTIONS, "--model", folder / "model", "--out", run]
    stopped = invoke(*words)
    assert stopped.exit_code == 75 and "by SIGTERM; saved" in stopped.output
    last = stopped.output.splitlines()[-1]
    assert last.startswith("Resume it") and last.endswith(" ".join(map(str, words)))
    monkeypatch.undo()
    assert invoke(*words).exit_code == 0
    assert len(tiny_run.losses(run)) == 2


def test_the_command_that_resumes_shows_no_secret(tmp_path: Path) -> None:
    command = ["trillora", "train", "r.yaml", "data.path=https://me:hunter22@host/x.csv", "--out", "runs/a b"]
    text = after_stop(tmp_path, command)
    assert "hunter22" not in text and "'runs/a b'" in text


def test_a_run_with_several_adapters_says_how_to_ask_one(tmp_path: Path) -> None:
    for name in ("code", "math"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
    text = after_training(tmp_path, load_recipe({"model": "smollm2", "data": "a.jsonl"}))
    assert f"chat {tmp_path} --adapter {tmp_path}/adapters/code    (others: math)" in text


def test_a_failed_start_with_a_data_file_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    result = invoke("train", folder / "chat.jsonl", "--model", folder / "model", "--out", tmp_path / "runs" / "new")
    assert result.exit_code == 2 and "did you mean 'chats.jsonl'?" in result.output
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_refuses_other_data_keeps_its_recipe(
    folder: Path, finished: tuple[Path, str], tmp_path: Path
) -> None:
    """More steps than it has: the early checks let it pass, the trainer compares the data."""
    run, _ = finished
    before = (run / "recipe.yaml").read_bytes()
    lines = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "others.jsonl").write_text("".join(lines[1:]))
    longer = [option if "steps" not in option else "train.steps=3" for option in OPTIONS]
    refused = invoke("train", tmp_path / "others.jsonl", *longer, "--model", folder / "model", "--out", run)
    assert refused.exit_code == 2 and "--accept-changes" in refused.output, refused.output
    assert (run / "recipe.yaml").read_bytes() == before


def test_a_data_file_needs_a_model_and_a_recipe_has_its_own(folder: Path, tmp_path: Path) -> None:
    result = invoke("train", folder / "chats.jsonl", "--out", tmp_path / "new")
    assert result.exit_code == 2 and "add --model MODEL: smollm2" in result.output
    result = invoke("train", "recipe.yaml", "--model", "smollm2", "--out", tmp_path / "new")
    assert result.exit_code == 2 and "model=smollm2" in result.output
