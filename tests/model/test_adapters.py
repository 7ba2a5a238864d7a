"""Adapters are compatible with PEFT: each reads what the other writes, and both compute the same logits."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from adapter_logits import (
    DIFFERENT,
    ROUNDING,
    SPECS,
    error_ratio,
    our_logits,
    ours,
    random_adapter,
    save,
    torch_logits,
)
from architecture_checks import distance
from safetensors.numpy import load_file, save_file

from trillora.errors import TrilloraError
from trillora.files.storage import MARK
from trillora.model.adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    adapter_files,
    check_changes_something,
    fit_adapter,
    load_adapter,
)
from trillora.model.layout import unstack
from trillora.model.loading.source import base_name
from trillora.model.lora import initial_adapter
from trillora.model.lora_spec import LoraSpec

pytestmark = pytest.mark.core


def as_from_others(folder: Path) -> None:
    """PEFT writes no checksums."""
    (folder / MARK).unlink()


def change_config(folder: Path, **changes: Any) -> None:
    as_from_others(folder)
    path = folder / CONFIG_FILE
    config = {**json.loads(path.read_text("utf-8")), **changes}
    path.write_text(json.dumps(config), "utf-8")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")  # PEFT's, on an adapter for a tied head
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys")  # PEFT does not look at parameters there
@pytest.mark.parametrize("name", SPECS)
def test_peft_loads_our_adapter_and_computes_the_same(name: str, tmp_path: Path) -> None:
    from peft import PeftModel

    model, adapter = save(tmp_path, name)
    theirs = PeftModel.from_pretrained(tiny_models.build(name), tmp_path)
    assert distance(torch_logits(tiny_models.build(name)), torch_logits(theirs)) > DIFFERENT
    assert error_ratio(our_logits(name, model, fit_adapter(adapter, model.adapter_layout, "here")), theirs) < ROUNDING


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_we_load_an_adapter_of_peft_and_compute_the_same(name: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM", use_rslora=name == "llama"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns that it sets fan_in_fan_out for Conv1D
        model = get_peft_model(tiny_models.build(name), config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_" in parameter_name:
                parameter.normal_(0, 0.3)
    assert distance(torch_logits(tiny_models.build(name)), torch_logits(model)) > DIFFERENT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT cannot check the vocabulary of a model without a folder
        model.save_pretrained(tmp_path)

    spec, adapter = load_adapter(tmp_path)
    assert (spec.rank, spec.alpha, spec.rslora, spec.dropout) == (4, 12, name == "llama", 0.0)
    loaded = ours(name, spec)
    stacked = fit_adapter(adapter, loaded.adapter_layout, str(tmp_path))
    assert error_ratio(our_logits(name, loaded, stacked), model) < ROUNDING


@pytest.mark.parametrize("name", SPECS)
def test_a_saved_adapter_loads_bit_for_bit(name: str, tmp_path: Path) -> None:
    model, adapter = save(tmp_path, name)
    spec, loaded = load_adapter(tmp_path)
    assert loaded.keys() == adapter.keys()
    assert all(loaded[key].tobytes() == adapter[key].tobytes() for key in adapter)
    assert (spec.rank, spec.alpha, spec.rslora, spec.dropout) == (
        *(SPECS[name].rank, SPECS[name].alpha),
        *(SPECS[name].rslora, SPECS[name].dropout),
    )
    assert ours(name, spec).targets == model.targets
    assert sorted(path.name for path in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE, MARK]


def test_the_configuration_has_what_peft_needs(tmp_path: Path) -> None:
    save(tmp_path, "ernie4_5")
    config = json.loads((tmp_path / CONFIG_FILE).read_text("utf-8"))
    assert config["base_model_name_or_path"] == "some/base"
    assert config["peft_type"] == "LORA" and config["task_type"] == "CAUSAL_LM"
    assert config["fan_in_fan_out"] is False
    # Short names would also select up_proj in every other layer.
    values = [f"model.layers.{i}.self_attn.v_proj" for i in range(4)]
    assert sorted(config["target_modules"]) == sorted(["lm_head", *values, "model.layers.1.mlp.up_proj"])
    save(tmp_path, "gpt2")
    config = json.loads((tmp_path / CONFIG_FILE).read_text("utf-8"))
    assert config["fan_in_fan_out"] is True


def test_linear_layers_named_like_experts_are_written_as_parameters(tmp_path: Path) -> None:
    model, _ = save(tmp_path, "ernie4_5_moe", LoraSpec(rank=2, dropout=0.1))
    config = json.loads((tmp_path / CONFIG_FILE).read_text("utf-8"))
    assert config["target_parameters"] == ["down_proj.weight", "gate_proj.weight", "up_proj.weight"]
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert config["lora_dropout"] == 0 and model.has_dropout  # PEFT raises for another value
    assert sum(name.endswith("mlp.shared_experts.up_proj") for name in model.targets) == 3
    save(tmp_path, "ernie4_5_moe", LoraSpec(rank=2, exclude=("model.layers.0.mlp.up_proj",)))
    config = json.loads((tmp_path / CONFIG_FILE).read_text("utf-8"))
    assert "model.layers.1.mlp.shared_experts.up_proj.weight" in config["target_parameters"]
    assert "model.layers.0.mlp.up_proj.weight" not in config["target_parameters"]


def test_an_adapter_on_the_embedded_model_names_its_hub_id() -> None:
    model = ours("llama", SPECS["llama"])
    files = adapter_files(random_adapter(model), model.module, model.targets, SPECS["llama"], base_name("smollm2"))
    assert json.loads(files[CONFIG_FILE])["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_an_adapter_that_changes_nothing_is_an_error() -> None:
    model = ours("llama", SPECS["llama"])
    start = initial_adapter(model.adapter_layout, seed=0)
    flat = unstack(start, model.adapter_layout)
    with pytest.raises(TrilloraError, match="every B matrix is zero"):
        check_changes_something(flat, "some/folder")


@pytest.mark.parametrize("missing", [CONFIG_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(TrilloraError, match=f"{missing} is missing") as caught:
        load_adapter(tmp_path)
    assert caught.value.where == str(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("peft_type", "IA3"),
        ("bias", "all"),
        ("lora_bias", True),
        ("layer_replication", [[0, 2]]),
        ("use_qalora", True),
    ],
)
def test_an_adapter_that_is_not_plain_lora_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    save(tmp_path)
    change_config(tmp_path, **{key: value})
    with pytest.raises(TrilloraError) as caught:
        load_adapter(tmp_path)
    assert key in caught.value.what and str(value) in caught.value.what
    assert caught.value.where == str(tmp_path / CONFIG_FILE)


def test_values_that_mean_not_used_are_accepted(tmp_path: Path) -> None:
    _, adapter = save(tmp_path)
    unused = {"modules_to_save": None, "rank_pattern": {}, "alpha_pattern": None, "use_dora": False, "bias": "none"}
    change_config(tmp_path, **unused)
    spec, loaded = load_adapter(tmp_path)
    assert not (spec.whole or spec.rank_pattern or spec.alpha_pattern or spec.dora)
    assert loaded.keys() == adapter.keys()


def test_other_matrices_are_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path)
    as_from_others(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_FILE)
    odd = "base_model.model.model.embed_tokens.lora_C.weight"
    save_file({**tensors, odd: np.ones((4, 256), np.float32)}, tmp_path / WEIGHTS_FILE)
    with pytest.raises(TrilloraError, match="lora_C"):
        load_adapter(tmp_path)


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_a_truncated_file_is_an_error(size: int, tmp_path: Path) -> None:
    save(tmp_path)
    as_from_others(tmp_path)
    path = tmp_path / WEIGHTS_FILE
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(TrilloraError, match="cannot be read") as caught:
        load_adapter(tmp_path)
    assert caught.value.where == str(path)


def fails_to_fit(adapter: dict[str, np.ndarray]) -> str:
    with pytest.raises(TrilloraError) as caught:
        fit_adapter(adapter, ours("llama", SPECS["llama"]).adapter_layout, "some/folder")
    assert caught.value.where == "some/folder"
    return caught.value.what


def test_an_adapter_that_does_not_fit_names_the_matrix() -> None:
    adapter = random_adapter(ours("llama", SPECS["llama"]))
    name = "model.layers.2.mlp.up_proj.lora_b"
    wrong = fails_to_fit({**adapter, name: np.zeros((7, 4), np.float32)})
    assert name in wrong and "(7, 4)" in wrong and "(96, 4)" in wrong
    missing = fails_to_fit({key: array for key, array in adapter.items() if key != name})
    assert name in missing and "missing" in missing
    extra = fails_to_fit({**adapter, "model.layers.9.mlp.up_proj.lora_b": adapter[name]})
    assert "model.layers.9.mlp.up_proj.lora_b" in extra and "no such matrix" in extra
