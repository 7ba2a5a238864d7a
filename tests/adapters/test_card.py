"""A finished adapter's folder is complete: PEFT's files, tokenizer, chat template and a model card without secrets."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
import yaml
from chat_tokenizers import chat_tokenizer
from dose import slow_case
from huggingface_hub import ModelCard
from transformers import AutoTokenizer
from typer.testing import CliRunner

from trillora.adapters.card import CARD_FILE, CardFacts, adapter_card, is_unedited, model_card, refresh_card
from trillora.certify.subject import find_subject
from trillora.cli import app
from trillora.errors import TrilloraError
from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.files.storage import RemoteStorage
from trillora.generation.generator import Generator
from trillora.model.adapters import load_adapter
from trillora.model.loading.description import EMBEDDED_NOTE
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = pytest.mark.usefixtures("shared_steps")

SECRET = "hf_abcdefghijklmnop123456"
PEFT_FILES = {"adapter_config.json", "adapter_model.safetensors", "checksums.json"}
TOKENIZER_FILES = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("card"), tiny_run.llama(num_layers=1))


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    lora = {"rank": 4, "alpha": 8.0, "alpha_pattern": {"q_proj": 4.0, "v_proj": 2.5}}
    sections = {"data": {"split": {"validation": 0.2}}, "evaluate": {"num_samples": 0}}
    train(load_recipe(tiny_run.recipe(folder, lora=lora, **sections)), folder / "run")
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


def test_the_card_has_data_recipe_and_versions_but_no_path(run: Path, folder: Path) -> None:
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


def test_the_card_says_that_the_embedded_base_is_a_copy(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    facts = json.loads((run / "run.json").read_text("utf-8"))
    facts["model"] |= {"name": "smollm2", "base_name": "HuggingFaceTB/SmolLM2-135M-Instruct"}
    (copied / "run.json").write_text(json.dumps(facts), "utf-8")
    config = (run / "adapter" / "adapter_config.json").read_bytes()
    assert EMBEDDED_NOTE in adapter_card(config, copied, name="run")
    assert EMBEDDED_NOTE not in adapter_card(config, run, name="run")


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


def test_a_recipes_own_template_is_next_to_its_adapter(folder: Path, tmp_path: Path) -> None:
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
    generation = json.loads((tmp_path / "merged" / "generation_config.json").read_text())
    assert chat_tokenizer("chatml").eos_token_id in generation["eos_token_id"]  # the base's files stop elsewhere
    by_adapter = open_source(str(run / "adapter"))
    assert by_adapter.matrices.keys() == source.matrices.keys() and by_adapter.run is not None


@pytest.mark.parametrize("tokens", [(), slow_case(("<tool>",))])
def test_the_code_on_the_report_runs_as_printed(
    tokens: tuple[str, ...], run: Path, folder: Path, tmp_path: Path
) -> None:
    """In a new process in another directory, offline, with the PEFT and transformers that are installed."""
    if tokens:
        settings = {**tiny_run.recipe(folder, train={"steps": 1}), "tokens": list(tokens)}
        train(load_recipe(settings), tmp_path / "run")
        run = tmp_path / "run"
    page = (run / "report.html").read_text("utf-8")
    [code] = re.findall(r'<pre class="code">(from peft.*?)</pre>', page, re.DOTALL)
    script = html.unescape(re.sub(r"<[^>]+>", "", code)) + "\n"
    check = """
logits = model(**tokenizer("What is 3 plus 4?", return_tensors="pt")).logits
num_trained = sum("lora_B" in name and bool(p.any()) for name, p in model.named_parameters())
print(type(model).__name__, len(tokenizer), logits.shape[-1], num_trained)
"""
    done = subprocess.run(
        [sys.executable, "-c", script + check], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    size = len(chat_tokenizer("chatml")) + len(tokens)
    num_trained = 7  # matrices of its one layer
    expected = ["PeftModelForCausalLM", str(size), str(size), str(num_trained)]
    assert done.stdout.split() == expected, done.stderr[-2000:]


def test_a_run_without_an_adapter_is_exported_from_its_last_checkpoint(folder: Path, tmp_path: Path) -> None:
    settings = tiny_run.recipe(folder, train={"steps": 4, "checkpoint_every": 2}, data={"chat_template": "zephyr"})
    train(load_recipe(settings), tmp_path / "run")
    finished = load_adapter(tmp_path / "run" / "adapter")[1]
    shutil.rmtree(tmp_path / "run" / "adapter")
    source = open_source(str(tmp_path / "run"))
    assert source.notes == ("The run is not finished: its adapter at the last checkpoint is used, step 4 of 4.",)
    assert all((source.matrices[name] == array).all() for name, array in finished.items())
    assert "message['role'] + '|>" in source.tokenizer_files()["chat_template.jinja"].decode()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    assert open_source(str(tmp_path / "run")).notes[0].endswith("step 2 of 4.")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(TrilloraError, match="no adapter yet, and no checkpoint"):
        open_source(str(tmp_path / "run"))


def test_an_address_that_only_a_run_names_is_not_contacted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder may come from another person, and the address would get this user's credentials."""
    url, run = "memory://bucket/exported", tmp_path / "run"
    train(load_recipe(tiny_run.recipe(folder, train={"steps": 1, "checkpoint_dir": url})), run)
    [stored] = RemoteStorage(url).names()
    copied = RemoteStorage(url).read(stored)
    with monkeypatch.context() as patch:
        patch.setattr(RemoteStorage, "__init__", lambda *_: pytest.fail("an address was contacted"))
        trained = find_subject(run).trained
        assert not trained.is_from_run and f"{url}, which is not contacted" in caplog.text
        shutil.move(run / "adapter", tmp_path / "adapter")
        with pytest.raises(TrilloraError, match="checkpoints are at memory://bucket/exported") as caught:
            open_source(str(run))
        assert f"--checkpoints {url}" in caught.value.do
        assert CliRunner().invoke(app, ["export", str(run)]).exit_code == 2
    named = open_source(str(run), overrides=[f"train.checkpoint_dir={url}"])
    (run / "checkpoints" / stored).mkdir(parents=True)
    for name, data in copied.items():
        (run / "checkpoints" / stored / name).write_bytes(data)
    beside = open_source(str(run))
    assert named.notes == beside.notes and "checkpoint is used, step 1 of 1" in beside.notes[0]
    shutil.move(tmp_path / "adapter", run / "adapter")
    assert find_subject(run).trained.is_from_run


def test_another_base_is_refused_unless_the_user_names_it(run: Path, folder: Path, tmp_path: Path) -> None:
    copied = shutil.copytree(run, tmp_path / "run")
    other = shutil.copytree(folder / "model", tmp_path / "model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    with pytest.raises(TrilloraError, match="not the one that this run was trained on"):
        open_source(str(copied), overrides=[f"model.name={other}"])
    assert open_source(str(copied), base=str(other)).base.folder == other
    lonely = shutil.copytree(run / "adapter", tmp_path / "lonely")
    config = json.loads((lonely / "adapter_config.json").read_text())
    (lonely / "checksums.json").unlink()
    (lonely / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "org/unknown"}))
    with pytest.raises(TrilloraError, match="not on this machine") as caught:
        open_source(str(lonely))
    assert "--base org/unknown" in caught.value.do


def test_the_export_command_writes_a_folder_once(run: Path) -> None:
    for code, said in ((0, "Exported to"), (2, "The output folder already exists")):
        result = CliRunner().invoke(app, ["export", str(run), "--to", "merged"])
        assert result.exit_code == code and said in result.output, result.output
        assert (run / "exports" / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "merged", "--type", "int3", "--out", "x"], "cannot be stored as int3"),
        (["--to", "mergd"], "did you mean 'merged'"),
        (["--to", "merged", "--repo", "a/b"], "--repo is for --to hub"),
        (["--to", "merged", "--adapter", "none"], "There is no such folder"),
    ],
)
def test_the_export_command_refuses(arguments: list[str], said: str, run: Path) -> None:
    result = CliRunner().invoke(app, ["export", str(run), *arguments])
    assert result.exit_code == 2 and said in result.output, result.output
    assert not Path("x").exists()
