"""A finished adapter's folder is complete: PEFT's files, tokenizer, chat template and a model card without secrets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from chat_tokenizers import chat_tokenizer
from huggingface_hub import ModelCard
from transformers import AutoTokenizer

from trillora.adapters.card import CARD_FILE, CardFacts, adapter_card, is_unedited, model_card, refresh_card
from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.generation.generator import Generator
from trillora.model.adapters import load_adapter
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

SECRET = "hf_abcdefghijklmnop123456"
PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors", "checksums.json"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("card"))


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    lora = {"rank": 4, "alpha": 8.0, "alpha_pattern": {"q_proj": 4.0, "v_proj": 2.5}}
    train(load_recipe(tiny_run.recipe(folder, lora=lora, data={"split": {"validation": 0.2}})), folder / "run")
    return folder / "run"


def metadata_of(card: str) -> dict[str, Any]:
    found = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(found, dict)
    return found


def test_the_folder_of_a_run_can_be_uploaded_as_it_is(run: Path, folder: Path) -> None:
    adapter = run / "adapter"
    assert {file.name for file in adapter.iterdir()} == {*PEFT_FILES, *TOKENIZER_FILES, CARD_FILE}
    config = json.loads((adapter / "adapter_config.json").read_text("utf-8"))
    assert type(config["lora_alpha"]) is int and config["alpha_pattern"] == {"q_proj": 4, "v_proj": 2.5}
    assert type(config["alpha_pattern"]["q_proj"]) is int
    ours, base = AutoTokenizer.from_pretrained(adapter), AutoTokenizer.from_pretrained(folder / "model")
    text = "What is 3 plus 4?<|im_end|>"
    assert ours(text)["input_ids"] == base(text)["input_ids"] and ours.chat_template == base.chat_template
    assert not {"is_local", "local_files_only"} & json.loads((adapter / "tokenizer_config.json").read_text()).keys()
    listed = json.loads((adapter / "checksums.json").read_text())["files"]
    assert {*listed} == {*PEFT_FILES, *TOKENIZER_FILES} - {"checksums.json"}
    assert Generator.open(str(run)).generate(["What is 3 plus 4?"], max_tokens=2)


def test_the_card_tells_data_recipe_and_versions_but_no_path(run: Path, folder: Path) -> None:
    card = (run / "adapter" / CARD_FILE).read_text("utf-8")
    metadata = metadata_of(card)
    assert metadata["library_name"] == "peft" and metadata["pipeline_tag"] == "text-generation"
    assert "base_model" not in metadata and "datasets" not in metadata  # both are paths here, which the hub refuses
    assert str(folder) not in card and str(run.parent) not in card and "/tmp" not in card
    for expected in ("chats.jsonl", "| rank | 4 |", "4 steps", "torchax", "Loss on held-out rows", "# run"):
        assert expected in card, expected
    ModelCard(card)  # the hub's own parser


def test_names_of_the_hub_are_linked_and_scores_are_indexed(run: Path) -> None:
    config = json.dumps({"base_model_name_or_path": "smollm2", "r": 4, "lora_alpha": 8}).encode()
    evaluated = {"data": "/home/me/private/test.jsonl", "num_rows": 32, "base": {"loss": 1.5}, "adapter": {"loss": 0.5}}
    (run / "eval.json").write_text(json.dumps(evaluated), "utf-8")
    try:
        card = adapter_card(config, run, name="first")
        refreshed = refresh_card(run)
        ours = (run / "adapter" / CARD_FILE).read_text("utf-8")
    finally:
        (run / "eval.json").unlink()
    metadata = metadata_of(card)
    hub_id = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert metadata["base_model"] == hub_id and metadata["base_model_relation"] == "adapter"
    assert f"base_model:adapter:{hub_id}" in metadata["tags"]
    [index] = metadata["model-index"]
    [result] = index["results"]
    assert result["dataset"]["name"] == "test.jsonl" and result["metrics"][0]["value"] == 0.5
    assert "private" not in card and "| loss | 1.5 | 0.5 |" in card
    evaluation = ModelCard(card).data.eval_results
    assert evaluation is not None and evaluation[0].metric_value == 0.5
    assert refreshed and "| loss | 1.5 | 0.5 |" in ours
    load_adapter(run / "adapter")  # a card may change: it has no checksum


def test_a_card_that_a_person_edited_stays(run: Path) -> None:
    file = run / "adapter" / CARD_FILE
    written = file.read_text("utf-8")
    assert is_unedited(written)
    file.write_text(written.replace("# run", "# My model"), "utf-8")
    assert not refresh_card(run) and "# My model" in file.read_text("utf-8")
    file.write_text(written, "utf-8")


def test_secrets_and_hostile_names_do_not_reach_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "correct-horse-battery")
    name = f"x\n---\nlicense: mit <script> {SECRET} correct-horse-battery | *b*"
    card = model_card(CardFacts(name, "../models/base", notes=["see s3://me:password@host/x"]))
    metadata = metadata_of(card)
    assert {*metadata} == {"library_name", "pipeline_tag", "tags"}
    for forbidden in (SECRET, "correct-horse-battery", "password", "<script>", "../models"):
        assert forbidden not in card, forbidden


def test_a_recipes_own_template_is_beside_its_adapter(folder: Path, tmp_path: Path) -> None:
    settings = tiny_run.recipe(folder, data={"chat_template": "zephyr"}, train={"steps": 1})
    train(load_recipe(settings), tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "adapter")
    assert "<|user|>" in tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|user|>" not in chat_tokenizer("chatml").chat_template


def test_a_run_is_exported_with_its_card_and_tokenizer(run: Path, tmp_path: Path) -> None:
    source = open_source(str(run))
    assert source.name == "run" and source.run == run and source.recipe is not None and not source.notes
    exported = export_merged(source, tmp_path / "merged")
    card = (tmp_path / "merged" / CARD_FILE).read_text("utf-8")
    assert metadata_of(card)["library_name"] == "transformers" and "A fine-tuned version" in card
    assert {*TOKENIZER_FILES, CARD_FILE} <= {*exported.files}
    by_adapter = open_source(str(run / "adapter"))
    assert by_adapter.matrices.keys() == source.matrices.keys() and by_adapter.run is not None
