"""A recipe that is made of a data file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trillora.early.from_data import is_data_file, options_from_data, recipe_text
from trillora.early.new import NewRecipe, new_recipe
from trillora.recipe.load import load_recipe


@pytest.mark.parametrize("name", ["qa.csv", "a/b.jsonl", "rows.json", "rows.jsonl.zst", "all.tar.gz", "Rows.PARQUET"])
def test_rows_are_recognized_by_their_suffix(name: str) -> None:
    assert is_data_file(name)


@pytest.mark.parametrize("name", ["recipe.yaml", "qa.yml", "qa", "runs/qa/recipe.json", "qa.csv.bak"])
def test_a_recipe_is_not_data(name: str) -> None:
    assert not is_data_file(name)


def test_the_written_recipe_has_the_given_options_and_is_read_back_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["train.steps=5", "lora.rank=4", "data.validation=val.csv"]
    recipe = load_recipe(options_from_data("qa.csv", "org/model"), overrides)
    text = recipe_text(recipe, "Trained on qa.csv.")
    assert text.splitlines() == [
        "# Trained on qa.csv.",
        "model: org/model",
        f"data: {{path: {tmp_path / 'qa.csv'}, validation: {tmp_path / 'val.csv'}}}",
        "lora: {rank: 4}",
        "train: {steps: 5}",
    ]
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "recipe.yaml").write_text(text)
    assert load_recipe(tmp_path / "elsewhere" / "recipe.yaml") == recipe


def test_a_recipe_without_overrides_is_two_lines(tmp_path: Path) -> None:
    recipe = load_recipe(options_from_data(tmp_path / "qa.csv"))
    assert recipe_text(recipe) == f"model: smollm2\ndata: {tmp_path / 'qa.csv'}\n"


def test_rows_with_two_answers_are_compared(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1+1?", "chosen": "2", "rejected": "3"}\n')
    (tmp_path / "labels.jsonl").write_text('{"prompt": "1+1?", "completion": "3", "label": false}\n')
    (tmp_path / "qa.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    losses = [
        load_recipe(options_from_data(tmp_path / f"{name}.jsonl")).train.loss for name in ("pairs", "labels", "qa")
    ]
    assert losses == ["dpo", "kto", "sft"]
    for name, loss in (("pairs", "dpo"), ("labels", "kto"), ("qa", "sft")):
        text = new_recipe(NewRecipe("smollm2", str(tmp_path / f"{name}.jsonl"), "cpu", "", tmp_path / "out"), tmp_path)
        (tmp_path / "recipe.yaml").write_text(text)
        recipe = load_recipe(tmp_path / "recipe.yaml")
        assert recipe.train.loss == loss and recipe.train.learning_rate == (2e-4 if loss == "sft" else 2e-5)
