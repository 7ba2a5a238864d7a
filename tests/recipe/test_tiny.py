"""`--tiny`: any recipe on the embedded model and in small sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from typer.testing import CliRunner

import trillora
from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.recipe.load import load_recipe, load_run_recipe
from trillora.recipe.schema import LISTS, Recipe
from trillora.recipe.tiny import APPLIED, is_tiny_run
from trillora.training.signals import EXIT_STOPPED

FULL: dict[str, Any] = {
    "model": {"name": "mistralai/Mistral-7B-v0.3", "dtype": "bfloat16", "quantize": "int8", "revision": "x"},
    "data": {"path": "HuggingFaceH4/ultrachat_200k", "pack": False},
    "lora": {"rank": 8, "targets": ["q_proj"]},
    "train": {
        "sequence_length": 4096,
        "batch_size": 64,
        "micro_batch_size": 16,
        "epochs": 3,
        "warmup_steps": 100,
        "optimizer": "lion-8bit",
        "learning_rate": 1e-4,
        "checkpoint_dir": "gs://bucket/run",
    },
    "evaluate": {"every_steps": 200, "num_samples": 0},
    "track": {"services": ["wandb"]},
    "hardware": {"backend": "tpu", "devices": 8, "mesh": {"fsdp": 8}},
    "engine": {"attention": "splash"},
    "tiny": {"data": {"path": "sample.jsonl"}, "train.learning_rate": 1e-3},
}


def tiny(source: Any, *overrides: str) -> Recipe:
    return load_recipe(source, overrides, tiny=True)


def refusal(source: Any, *overrides: str) -> TrilloraError:
    with pytest.raises(TrilloraError) as caught:
        tiny(source, *overrides)
    return caught.value


def test_what_makes_a_recipe_stays_and_what_needs_its_chip_goes() -> None:
    full, small = load_recipe(FULL), tiny(FULL)
    assert small.model == load_recipe({"model": "smollm2", "data": "d"}).model
    assert small.hardware == load_recipe({"model": "m", "data": "d", "hardware": {"devices": 1}}).hardware
    assert small.engine == load_recipe({"model": "m", "data": "d"}).engine
    train = small.train
    assert (train.sequence_length, train.batch_size, train.micro_batch_size) == (256, 4, "auto")
    assert (train.steps, train.epochs, train.warmup_steps, train.checkpoint_dir) == (40, None, 4, None)
    assert (train.optimizer, train.learning_rate) == ("lion-8bit", 1e-3)
    assert small.evaluate.num_samples == 0 and small.evaluate.every_steps == 20
    assert small.track.services == ()
    assert small.lora == full.lora
    assert small.data is not None and small.data.path == str(Path.cwd() / "sample.jsonl") and not small.data.pack
    assert (full.tiny, small.tiny) == (None, APPLIED)
    assert full.train.learning_rate == 1e-4


def test_overrides_on_the_command_line_come_last() -> None:
    small = tiny(FULL, "train.epochs=2", "train.learning_rate=3e-3", "model=HuggingFaceTB/SmolLM2-360M")
    assert (small.train.steps, small.train.epochs, small.train.learning_rate) == (None, 2, 3e-3)
    assert small.model.name == "HuggingFaceTB/SmolLM2-360M"


@pytest.mark.parametrize("part", LISTS)
def test_each_stage_or_phase_is_made_small_and_can_be_overridden(part: str) -> None:
    own = [{"name": name, "data": f"owner/{name}", "epochs": 2, "learning_rate": 1e-5} for name in ("one", "two")]
    if part == "stages":
        own[0] |= {"sequence_length": 1024, "micro_batch_size": 8, "batch_size": 8}
    recipe = {"model": "m", part: own, "tiny": {part: {0: {"data": "a.jsonl", "steps": 3}, 1: {"data": "b.jsonl"}}}}
    small = tiny(recipe)
    first, second = getattr(small, part)
    assert (first.steps, second.steps, first.epochs) == (3, None, None)
    assert (first.data.path, second.learning_rate) == (str(Path.cwd() / "a.jsonl"), 1e-5)
    if part == "stages":
        assert (first.sequence_length, first.batch_size) == (256, 4)


def test_data_of_the_hub_must_be_replaced() -> None:
    recipe = {name: section for name, section in FULL.items() if name != "tiny"}
    error = refusal(recipe)
    assert "data.path" in error.what and "section tiny" in error.do and "data.path=FILE" in error.do
    assert tiny(recipe, "data.path=x.jsonl").data is not None
    mixed = {"path": [{"path": "a.jsonl"}, {"path": "owner/name", "weight": 0.5}]}
    assert "data.path.1.path" in refusal({**recipe, "data": mixed}).what
    assert "validation" in refusal({**recipe, "data": {"path": "a.jsonl", "validation": "https://x.org/b.jsonl"}}).what
    stages = [{"name": "one", "data": "owner/name"}]
    assert "stages.0.data.path" in refusal({"model": "m", "stages": stages}).what


def test_a_mistake_in_the_section_is_found_where_it_is(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("model: m\ndata: a.jsonl\ntiny: {train: {stepz: 3}}\n")
    error = refusal(file)
    assert "tiny.train.stepz" in str(error.where) and "train.steps" in error.do
    file.write_text("model: m\ndata: a.jsonl\ntiny: 3\n")
    assert "not a mapping" in refusal(file).what
    with pytest.raises(TrilloraError, match="not a mapping"):
        load_recipe(file)
    file.write_text("model: m\ndata: a.jsonl\ntrain: {batch_size: many}\n")
    assert "train.batch_size" in refusal(file).what
    assert "cannot be overridden" in refusal(FULL, "tiny.train.steps=3").what


def test_paths_in_the_section_count_from_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("model: m\ndata: owner/name\ntiny: {data: sample.jsonl}\n")
    data = tiny(tmp_path / "recipe.yaml").data
    assert data is not None and data.path == str(tmp_path / "sample.jsonl")


def test_a_tiny_run_says_so_and_is_resumed_without_the_option(tmp_path: Path) -> None:
    """The section replaces the embedded model by a smaller one, to be fast."""
    tiny_run.write_both(tmp_path, tiny_run.llama(1, 32))
    recipe = {
        "model": "mistralai/Mistral-7B-v0.3",
        "data": {"path": "owner/name"},
        "tiny": {
            "model": str(tmp_path / "model"),
            "data": {"path": str(tmp_path / "chats.jsonl")},
            "train": {"sequence_length": 64, "steps": 100_000, "time_limit": "1s"},
        },
    }
    (tmp_path / "recipe.json.yaml").write_text(json.dumps(recipe))
    command = ["train", str(tmp_path / "recipe.json.yaml"), "--out", str(tmp_path / "run")]
    first = CliRunner().invoke(app, [*command, "--tiny"])
    assert first.exit_code == EXIT_STOPPED, first.output
    assert "--tiny" in first.output
    assert is_tiny_run(tmp_path / "run") and load_run_recipe(tmp_path / "run").recipe.tiny == APPLIED
    assert "\ntiny: applied\n" in (tmp_path / "run" / "resolved.yaml").read_text()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == EXIT_STOPPED, again.output
    assert "Resuming from step" in again.output
    assert load_recipe(tmp_path / "run" / "resolved.yaml", tiny=True) == load_recipe(tmp_path / "run" / "recipe.json")
    assert len(trillora.inspect_data(tmp_path / "recipe.json.yaml", tiny=True)) == 1
