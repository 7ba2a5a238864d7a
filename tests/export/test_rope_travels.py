"""A run with `model.rope`: its scaling goes with the adapter into everything that is made from it, and what would lose
it is refused. The model was trained for 64 positions; its sequences have 96."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from architecture_checks import distance
from certificate_text import shown
from gguf import GGUFReader
from llama_cpp import LlamaCpp
from peft import PeftModel
from planted_defects import seal
from transformers import AutoConfig, AutoModelForCausalLM

from trillora.adapters.card import refresh_card
from trillora.adapters.merge import merge_adapters
from trillora.certify.certify import certify
from trillora.data.summary import inspect
from trillora.errors import TrilloraError
from trillora.events import Alarm, ignore_events
from trillora.export.gguf.lora import export_lora_gguf
from trillora.export.gguf.write import export_gguf
from trillora.export.hub import adapter_to_push
from trillora.export.merged import export_merged
from trillora.export.source import open_source
from trillora.generation.generator import Generator
from trillora.model.loading.rope import read_positions
from trillora.preflight.inputs import read_inputs
from trillora.recipe.group_section import MergeOptions
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.runs.adapter import adapter_of
from trillora.runs.saved import SavedRun
from trillora.serving.served import open_service
from trillora.training.trainer import train

TRAINED = 64
LONG: dict[str, Any] = {"sequence_length": 96, "batch_size": 4, "steps": 3, "checkpoint_every": 1}
SAME, DIFFERENT = 1e-4, 1e-2  # relative: float32 sums in another order; what the scaling changes
YARN = {"rope": {"type": "yarn", "factor": 4}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_run.llama(num_layers=1)
    config.max_position_embeddings = TRAINED
    return tiny_run.write_both(tmp_path_factory.mktemp("rope"), config)


def trained(folder: Path, name: str, rope: dict[str, Any], **train_options: Any) -> Path:
    recipe = tiny_run.recipe(folder, model=rope, train={**LONG, **train_options}, evaluate={"num_samples": 0})
    train(load_recipe(recipe), folder / name)
    return folder / name


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return trained(folder, "run", YARN)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return trained(folder, "plain", {}, sequence_length=TRAINED)


def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(5, 200, (2, 90))


def logits_of(model: Any) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model.eval()(input_ids=torch.tensor(tokens()), use_cache=False).logits.float().numpy()
        return found


def by_the_card(folder: Path, run: Path, *, scaled: bool = True) -> np.ndarray:
    """PEFT with the base as the card's code opens it; the values are taken from the text of the card."""
    config = AutoConfig.from_pretrained(folder / "model")
    [values] = re.findall(r"--hf-overrides '(.*)'", (run / "adapter" / "README.md").read_text())
    if scaled:
        config.get_text_config().update(json.loads(values))
    base = AutoModelForCausalLM.from_pretrained(folder / "model", config=config, dtype=torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return logits_of(PeftModel.from_pretrained(base, str(run / "adapter")))


def test_the_adapter_says_how_its_base_is_scaled(folder: Path, run: Path) -> None:
    expected = {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
        "max_position_embeddings": 4 * TRAINED,
    }
    assert json.loads((run / "adapter" / "rope.json").read_text()) == expected
    assert json.loads((run / "recipe.json").read_text())["recipe"]["model"]["rope"] == {"type": "yarn", "factor": 4.0}
    assert "rope.json" in (run / "adapter" / "checksums.json").read_text()
    card = (run / "adapter" / "README.md").read_text()
    assert "yarn, factor 4, for up to 256 tokens where the base has 64" in card
    [values] = re.findall(r"get_text_config\(\)\.update\((.*)\)\n", card)
    assert json.loads(values.replace("'", '"')) == expected
    assert refresh_card(run) and (run / "adapter" / "README.md").read_text() == card
    pushed = adapter_to_push(open_source(str(run / "adapter")), "org/base")
    assert "rope.json" in pushed and b"yarn, factor 4" in pushed["README.md"]  # type: ignore[operator]


def test_a_merged_model_computes_what_the_card_describes(folder: Path, run: Path, tmp_path: Path) -> None:
    export_merged(open_source(str(run)), tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert merged.config.max_position_embeddings == 4 * TRAINED and merged.config.rope_parameters["factor"] == 4.0
    expected = by_the_card(folder, run)
    assert distance(logits_of(merged), expected) < SAME
    assert distance(by_the_card(folder, run, scaled=False), expected) > DIFFERENT
    assert "nothing has to be set" in (tmp_path / "merged" / "README.md").read_text()


def test_llama_cpp_computes_what_the_card_describes(folder: Path, run: Path, tmp_path: Path) -> None:
    exported = export_gguf(open_source(str(run)), tmp_path / "gguf", type="f32")
    file = tmp_path / "gguf" / exported.files[0]
    header = {key: field.contents() for key, field in GGUFReader(file).fields.items()}
    assert header["llama.rope.scaling.type"] == "yarn" and header["llama.rope.scaling.factor"] == 4.0
    assert header["llama.rope.scaling.original_context_length"] == TRAINED
    assert header["llama.context_length"] == 4 * TRAINED
    found = by_the_card(folder, run)[:, -1].astype(np.float64)
    expected = found - np.log(np.exp(found).sum(-1, keepdims=True))
    with LlamaCpp(file) as reader:
        assert np.abs(reader.log_probs(tokens().tolist()) - expected).max() < 1e-3  # as in test_gguf.py


def test_what_has_no_place_for_it_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(TrilloraError, match=r"yarn, factor 4.*no place") as caught:
        export_lora_gguf(open_source(str(run)), tmp_path / "lora")
    assert "--to gguf" in str(caught.value.do) and not (tmp_path / "lora").exists()


@pytest.mark.parametrize("alone", [False, True])
def test_readers_scale_the_base(run: Path, folder: Path, tmp_path: Path, alone: bool) -> None:
    """By the run, and by the adapter's folder without its run."""
    if alone:
        shutil.copytree(run / "adapter", tmp_path / "copy")
        generator = Generator.open(str(folder / "model"), adapter=tmp_path / "copy")
        assert open_source(str(tmp_path / "copy")).base.config.max_position_embeddings == 4 * TRAINED
    else:
        generator = Generator.open(str(run))
    assert generator.longest == 4 * TRAINED
    found = np.asarray(
        generator.model.logits(generator.base, generator.adapter, {"tokens": jnp.asarray(tokens(), jnp.int32)})
    )
    assert distance(found, by_the_card(folder, run)) < SAME


def test_an_unfinished_run_has_it_too(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "adapter")
    folder = adapter_of(SavedRun.open(tmp_path / "run")).folder
    assert (folder / "rope.json").read_bytes() == (run / "adapter" / "rope.json").read_bytes()


@pytest.fixture(scope="module")
def certified(run: Path) -> Path:
    certificate = certify(run)
    assert certificate.passed, shown(certificate)
    [check] = [check for check in certificate.checks if check.name == "positions"]
    assert check.status == "ok" and "yarn, factor 4" in check.what
    return run


def test_a_certified_export_has_the_scaling(certified: Path, tmp_path: Path) -> None:
    merged = export_merged(open_source(str(certified)), certified / "exports" / "merged").folder
    certificate = certify(merged)
    assert certificate.passed, shown(certificate)
    content = json.loads((merged / "config.json").read_text())
    del content["rope_parameters"]["factor"]
    content["rope_parameters"]["rope_type"] = "default"
    (merged / "config.json").write_text(json.dumps(content))
    found = certify(merged)
    assert any(check.name == "config.json" and "rope_type" in check.what for check in found.failed), shown(found)


@pytest.mark.parametrize("defect", ["missing", "factor", "added"])
def test_a_wrong_rope_file_is_no_adapter_of_the_run(defect: str, certified: Path, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain if defect == "added" else certified, tmp_path / "run")
    adapter = tmp_path / "run" / "adapter"
    file = adapter / "rope.json"
    match defect:
        case "missing":
            file.unlink()
            facts = json.loads((adapter / "checksums.json").read_text())
            del facts["files"]["rope.json"]
            (adapter / "checksums.json").write_text(json.dumps(facts))
        case "factor":
            file.write_text(file.read_text().replace("4.0", "2.0"))
        case "added":
            file.write_bytes((certified / "adapter" / "rope.json").read_bytes())
    seal(adapter)
    certificate = certify(tmp_path / "run")
    failed = [check.what for check in certificate.failed if check.part == "contents"]
    assert any("rope.json" in what for what in failed), shown(certificate)


def test_adapters_with_other_positions_are_not_mixed(folder: Path, run: Path, plain: Path, tmp_path: Path) -> None:
    assert not (plain / "adapter" / "rope.json").exists()
    with pytest.raises(TrilloraError, match=r"yarn, factor 4 and not scaled") as caught:
        merge_adapters([run, plain], MergeOptions("linear"), tmp_path / "merged")
    assert "model.rope" in str(caught.value.do)
    with pytest.raises(TrilloraError, match="cannot share a base"):
        open_service(str(run), adapters=[str(plain / "adapter")])
    with pytest.raises(TrilloraError, match="no scaling"):
        Generator.open(str(run), adapter=plain / "adapter")
    other = trained(folder, "other", YARN, seed=1)
    result = merge_adapters([run, other], MergeOptions("linear"), tmp_path / "merged")
    assert result.logits is not None  # compared on the scaled base
    assert read_positions(tmp_path / "merged") == read_positions(run / "adapter")
    assert "yarn, factor 4" in (tmp_path / "merged" / "README.md").read_text()


def test_a_run_may_start_from_an_adapter_with_other_positions(folder: Path, run: Path) -> None:
    alarms: list[str] = []
    short = {**LONG, "sequence_length": TRAINED, "steps": 1}
    recipe = tiny_run.recipe(folder, train=short, evaluate={"num_samples": 0})
    recipe["lora"] = {"from": str(run)}
    train(
        load_recipe(recipe),
        folder / "onward",
        listener=lambda event: alarms.append(event.text) if isinstance(event, Alarm) else None,
    )
    assert any("yarn, factor 4" in alarm and "not scaled" in alarm for alarm in alarms)


def test_long_rows_without_it_are_refused_with_the_line_to_write(folder: Path) -> None:
    recipe = load_recipe(tiny_run.recipe(folder, train=LONG))
    line = "model.rope: {type: yarn, factor: 2}"
    with pytest.raises(TrilloraError, match="96 tokens") as caught:
        train(recipe, folder / "refused")
    assert line in str(caught.value.do) and not (folder / "refused").exists()
    [stage] = stages_of(recipe)
    verdict = inspect(stage.recipe).verdict
    assert not verdict.ready and line in verdict.do
    assert any(line in note for note in read_inputs(recipe, ignore_events).notes)
    scaled = load_recipe(tiny_run.recipe(folder, model=YARN, train=LONG))
    assert inspect(stages_of(scaled)[0].recipe).verdict.ready
    assert not any("rope" in note for note in read_inputs(scaled, ignore_events).notes)
