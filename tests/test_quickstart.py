"""A small quickstart: it trains on two findings, evaluates on two, and writes every promised file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from dose import full_dose_only

from trillora.quickstart import run
from trillora.recipe.load import load_recipe


@full_dose_only
def test_quickstart_trains_tests_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "NUM_TRAINED", 2)
    monkeypatch.setattr(run, "NUM_TESTED", 2)
    events: list[Any] = []
    result, evaluation = run.run(tmp_path / "first", events.append)
    assert evaluation is not None and result.adapter is not None and 1 <= len(result.losses) <= 2
    assert evaluation.num_rows == 2 and evaluation.base is not None
    assert set(evaluation.majority) == {"provider", "area", "severity"}
    assert json.loads((result.run / "eval.json").read_text())["num_rows"] == 2
    assert "severity" in (result.run / "report.html").read_text()
    text = run.next_steps(result.run)
    assert str(result.adapter) in text and "report.html" in text and "trillora chat" in text and "data=FILE" in text
    # The recipe can be used as it is: its data is in the same folder.
    recipe = load_recipe(result.run / "recipe.yaml")
    assert recipe.data is not None and recipe.data.path == str(result.run / "train.jsonl")


def test_a_finished_quickstart_is_not_changed_and_an_unfinished_one_is_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "quickstart"
    assert run._resumable_or_new(folder) == folder
    folder.mkdir()
    assert run._resumable_or_new(folder) == tmp_path / "quickstart-2", "not a folder of the quickstart"
    (folder / "recipe.yaml").write_text(run.RECIPE)
    assert run._resumable_or_new(folder) == folder
    (folder / "adapter").mkdir()
    assert run._resumable_or_new(folder) == tmp_path / "quickstart-2"
