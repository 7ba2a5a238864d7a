"""A start that fails leaves nothing: no folder, no lock, no empty parent. What was there before stays."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from run_locks import first_line, owner

from trillora.errors import TrilloraError
from trillora.files.owner import lock_run, removed_if_unused
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

# What is wrong, and words of the error.
MISTAKES: dict[str, tuple[dict[str, dict[str, Any]], str]] = {
    "no data": ({"data": {"path": "/none/chats.jsonl"}}, "none"),
    "no model": ({"model": {"name": "/none/model"}}, "none"),
    "no such layer": ({"lora": {"targets": ["q_prj"]}}, "q_prj"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.llama(num_layers=1, width=32))


def start(folder: Path, mistake: str, out: Path, **more: dict[str, Any]) -> None:
    wrong, words = MISTAKES[mistake]
    with pytest.raises(TrilloraError) as caught:
        train(load_recipe(tiny_run.recipe(folder, **wrong, **more)), out)
    assert words in str(caught.value)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_failed_start_leaves_nothing(folder: Path, tmp_path: Path, mistake: str) -> None:
    start(folder, mistake, tmp_path / "runs" / "new")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_there_stays_as_it_was(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "other").mkdir()
    start(folder, "no data", tmp_path / "mine", train={"checkpoint_dir": str(tmp_path / "other" / "checkpoints")})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".lock"]
    assert list((tmp_path / "other").iterdir()) == []


def test_only_folders_without_content_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "new"
    with pytest.raises(KeyboardInterrupt), removed_if_unused(run / "checkpoints", run), lock_run(run):
        with lock_run(run / "checkpoints"):
            (run / "recipe.json").touch()
        raise KeyboardInterrupt
    assert sorted(path.name for path in run.iterdir()) == [".lock", "recipe.json"]


def test_a_folder_that_another_process_took_in_between_stays(tmp_path: Path) -> None:
    run = tmp_path / "new"
    with ExitStack() as stack:
        with pytest.raises(RuntimeError), removed_if_unused(run):
            assert first_line(stack.enter_context(owner(run))) == "owns"
            (run / ".lock-owner").unlink()  # as just before it is written
            raise RuntimeError
        assert [path.name for path in run.iterdir()] == [".lock"]
