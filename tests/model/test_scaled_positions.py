"""`model.rope`: our engine computes what transformers computes with the same configuration, and what cannot be scaled
is refused with its reason."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import torch
from architecture_checks import LOGITS, base_weights, distance
from huggingface_hub.errors import StrictDataclassError
from tiny_run import write_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from trillora.errors import TrilloraError
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.limits import HAS_OWN_ROTATION, can_have_yarn, check_rows, why_not_scaled
from trillora.model.loading.rope import ScaledPositions, read_positions, rope_of, scale_positions
from trillora.model.loading.source import load_config
from trillora.recipe.lora import RopeSection

TRAINED, LONG = 16, 56
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": TRAINED,
    "initializer_range": 0.2,
}
THETA = 1000.0
# What transformers' documentation asks for, written by hand.
BY_HAND: dict[str, dict[str, Any]] = {
    "yarn": {"factor": 4.0, "original_max_position_embeddings": TRAINED},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
}
MODELS = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gpt_neox": {"hidden_act": "gelu", "partial_rotary_factor": 0.5},
}


def config_of(name: str, **options: Any) -> Any:
    plain = {"rope_type": "default", "rope_theta": THETA}
    return AutoConfig.for_model(name, **{**SIZES, **MODELS.get(name, {}), "rope_parameters": plain, **options})


def reference(name: str, parameters: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = config_of(name, rope_parameters={"rope_theta": THETA, **parameters}, max_position_embeddings=64)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", BY_HAND)
def test_logits_are_those_of_transformers_with_the_same_config(name: str, kind: str) -> None:
    config = config_of(name)
    scale_positions(config, RopeSection.model_validate({"type": kind, "factor": 4}), "config.json")
    theirs = reference(name, {"rope_type": kind, **BY_HAND[kind]})
    plain = reference(name, {"rope_type": "default"})
    tokens = np.random.default_rng(0).integers(0, 128, (2, LONG))
    with torch.no_grad():
        expected, unscaled = (model(torch.tensor(tokens)).logits.numpy() for model in (theirs, plain))
    ours = CausalLM(config, ModelOptions(remat="none"))
    found = ours.logits(base_weights(ours, theirs), {}, {"tokens": jnp.asarray(tokens, jnp.int32)})
    assert distance(found, expected) < LOGITS
    assert distance(unscaled, expected) > 100 * LOGITS  # the weights are the same: only the positions differ
    assert config.max_position_embeddings == 4 * TRAINED


@pytest.mark.parametrize("kind", BY_HAND)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_config_json_is_read_by_transformers_as_it_was_trained(kind: str, style: str, tmp_path: Path) -> None:
    content = {**config_of("qwen2").to_dict(), "model_type": "qwen2"}
    if style == "rope_scaling":  # as versions before 5 wrote it
        content |= {"rope_theta": content.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
    (tmp_path / "config.json").write_text(json.dumps(content))
    scaled = load_config(tmp_path, rope=RopeSection.model_validate({"type": kind, "factor": 2.5}))
    ScaledPositions.of(scaled).write_to(content)
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert (style in content) and not {"rope_parameters", "rope_scaling"} <= content.keys()
    found = AutoConfig.from_pretrained(tmp_path)
    assert found.rope_parameters == scaled.rope_parameters
    assert found.rope_parameters["rope_theta"] == THETA and found.rope_parameters["factor"] == 2.5
    assert found.max_position_embeddings == scaled.max_position_embeddings == 40


def test_the_text_model_of_a_wrapper_is_scaled(tmp_path: Path) -> None:
    config = tiny_models.configuration("mistral3")
    text, before = config.get_text_config(), config.get_text_config().max_position_embeddings
    scale_positions(config, RopeSection(type="yarn", factor=2), "config.json")
    assert text.max_position_embeddings == 2 * before and text.rope_parameters["rope_type"] == "yarn"
    content = tiny_models.configuration("mistral3").to_dict()
    ScaledPositions.of(config).write_to(content)
    assert content["text_config"]["rope_parameters"]["rope_type"] == "yarn"
    assert "rope_parameters" not in content and "max_position_embeddings" not in content


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("gpt2", {}, "no rotary positions"),
        ("falcon", {"alibi": True}, "no rotary positions"),
        ("recurrent_gemma", {}, "no rotary positions"),
        ("gemma3_text", {}, "kinds of layers"),
        ("phi3", {}, "longrope only"),
        ("phimoe", {}, "longrope only"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
            "type linear already",
        ),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}}, "type dynamic"),
        ("qwen2_5_vl_text", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 3, 3]}}, "mrope_section"),
    ],
)
def test_what_cannot_be_scaled_is_refused(name: str, options: dict[str, Any], why: str) -> None:
    config = AutoConfig.for_model(name, **options)
    with pytest.raises(TrilloraError, match=why) as caught:
        scale_positions(config, RopeSection(type="yarn", factor=4), "config.json")
    assert "model.rope" in str(caught.value.where) and "remove model.rope" in str(caught.value.do)


def test_every_model_that_can_be_scaled_reads_the_rope_type() -> None:
    """transformers' code of a model looks its frequencies up by their type, or the model is listed in `limits`."""
    seen: set[str] = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            text = AutoConfig.for_model(name).get_text_config()
        except (
            ValueError,
            KeyError,
            ImportError,
            StrictDataclassError,
        ):  # a config that needs another library, or has several text models
            continue
        kind = text.model_type
        if why_not_scaled(text) is not None and kind not in HAS_OWN_ROTATION:
            continue
        code = [file.read_text() for file in Path(inspect.getfile(type(text))).parent.glob("modeling_*.py")]
        assert any("ROPE_INIT_FUNCTIONS" in each for each in code) != (kind in HAS_OWN_ROTATION), name
        seen.add(kind)
    assert len(seen) > 60 and seen.issuperset(HAS_OWN_ROTATION)


def test_every_scaled_config_is_read_again_and_has_frequencies_without_a_head_dim() -> None:
    seen = set()
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for kind in BY_HAND:
            try:
                text = AutoConfig.for_model(name).get_text_config()
            except (ValueError, KeyError, ImportError, StrictDataclassError):  # as above
                continue
            if why_not_scaled(text) is not None or (kind == "yarn" and not can_have_yarn(text)):
                continue
            scale_positions(text, RopeSection.model_validate({"type": kind, "factor": 4}), "config.json")
            if not can_have_yarn(text):
                assert torch.isfinite(ROPE_INIT_FUNCTIONS[kind](text, torch.device("cpu"))[0]).all()
            assert type(text).from_dict(text.to_dict()).rope_parameters == text.rope_parameters
            seen.add((name, kind))
    assert len({name for name, _ in seen}) > 60
    assert {("mixtral", "llama3"), ("mixtral", "linear")} <= seen


def test_yarn_without_a_head_dim_is_refused_and_not_proposed() -> None:
    config = AutoConfig.for_model("mixtral", max_position_embeddings=16)
    with pytest.raises(TrilloraError, match="no head_dim") as caught:
        scale_positions(config, RopeSection(type="yarn", factor=4), "config.json")
    assert "type: llama3 or linear" in str(caught.value.do)
    with pytest.raises(TrilloraError, match="40 tokens") as caught:
        check_rows(config, 40)
    assert "model.rope: {type: llama3, factor: 3}" in str(caught.value.do)


def test_rows_that_are_too_long_say_the_lines_to_write() -> None:
    config = config_of("llama")
    check_rows(config, TRAINED)
    with pytest.raises(TrilloraError, match="40 tokens") as caught:
        check_rows(config, 40)
    assert caught.value.do == "use at most 16, or scale the positions: model.rope: {type: yarn, factor: 3}"
    rope = RopeSection(type="yarn", factor=2)
    scale_positions(config, rope, "config.json")
    check_rows(config, 2 * TRAINED, rope)
    with pytest.raises(TrilloraError, match="32 positions") as caught:
        check_rows(config, 40, rope)
    assert caught.value.do == "use at most 32, or set model.rope.factor to 3"
    with pytest.raises(TrilloraError) as caught:
        check_rows(AutoConfig.for_model("gpt2", n_positions=16), 40)
    assert "rope" not in str(caught.value.do)


GOOD = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        json.dumps({**GOOD, "max_position_embeddings": 0}),
        json.dumps({**GOOD, "rope_parameters": {**GOOD["rope_parameters"], "rope_type": "dynamic"}}),  # type: ignore[dict-item]
        json.dumps({**GOOD, "rope_parameters": {**GOOD["rope_parameters"], "factor": 1e9}}),  # type: ignore[dict-item]
        json.dumps({**GOOD, "rope_parameters": {**GOOD["rope_parameters"], "factor": "2"}}),  # type: ignore[dict-item]
        json.dumps(GOOD).replace("2.0", "NaN"),
    ],
)
def test_a_damaged_rope_file_is_an_error_with_its_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "rope.json").write_text(content)
    with pytest.raises(TrilloraError) as caught:
        read_positions(tmp_path)
    assert "rope.json" in str(caught.value.where)


def test_other_keys_of_a_rope_file_are_not_kept(tmp_path: Path) -> None:
    parameters = {**GOOD["rope_parameters"], "beta_fast": "![](x)"}  # type: ignore[dict-item]
    (tmp_path / "rope.json").write_text(json.dumps({**GOOD, "rope_parameters": parameters, "auto_map": {"a": "b"}}))
    found = read_positions(tmp_path)
    assert found is not None and found.values() == GOOD and found.original == 32


def test_a_recipe_may_not_contradict_the_adapter(tmp_path: Path) -> None:
    rope = RopeSection(type="yarn", factor=2)
    assert rope_of(None, rope) == rope and rope_of(tmp_path) is None
    with pytest.raises(TrilloraError, match="no scaling"):
        rope_of(tmp_path, rope)
    (tmp_path / "rope.json").write_text(json.dumps(GOOD))
    assert rope_of(tmp_path) == rope_of(tmp_path, rope) == rope
    with pytest.raises(TrilloraError, match=r"yarn, factor 2.*yarn, factor 4"):
        rope_of(tmp_path, RopeSection(type="yarn", factor=4))


def test_a_folder_is_opened_with_scaled_positions(tmp_path: Path) -> None:
    config = load_config(write_model(tmp_path / "model"), rope=RopeSection(type="linear", factor=2))
    assert config.rope_parameters["factor"] == 2.0 and "original_max_position_embeddings" not in config.rope_parameters
