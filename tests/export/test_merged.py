"""A merged model: transformers loads it without a missing or unexpected weight, and computes what PEFT computes."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch
from architecture_checks import distance
from dose import full_dose_only, slow_case
from merge_cases import CASES, LINEAR, open_folder, source_of, torch_base
from peft_parity import DIFFERENT, SAME, VOCABULARY, quiet_peft, tokens_with
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from trillora.errors import TrilloraError
from trillora.events import Progress
from trillora.export import merged
from trillora.export.merged import export_merged
from trillora.export.merged_weights import MergedWeights

NEW = [5, VOCABULARY, VOCABULARY + 1]  # an old token and two new ones
# PEFT merges these wrongly: it adds the change of one of two tied weights to both. Its own forward pass is right.
PEFT_MERGES_WRONGLY = {"dora on a tied head", "tied head", "tied embedding"}
NOT_HELD = {"dora on a tied head", "untied embedding", "conv1d dora"}


def logits_of(model: Any, tokens: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model.eval()(input_ids=torch.tensor(tokens), use_cache=False).logits.float().numpy()
        return found


def loaded(folder: Path) -> Any:
    """The exported model in transformers, which must use every weight and miss none."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
@pytest.mark.parametrize("case", [slow_case(name) if name in NOT_HELD else name for name in CASES])
def test_a_merged_model_computes_what_peft_computes(case: str, tmp_path: Path) -> None:
    name, options, has_head = CASES[case]
    tokens = tokens_with(())
    source, adapted = source_of(tmp_path, name, options)
    expected, plain = logits_of(adapted, tokens), logits_of(torch_base(name), tokens)
    assert distance(plain, expected) > DIFFERENT
    exported = export_merged(source, tmp_path / "merged")
    assert distance(logits_of(loaded(tmp_path / "merged"), tokens), expected) < SAME
    if case not in PEFT_MERGES_WRONGLY:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = adapted.merge_and_unload().state_dict()
        weights = MergedWeights(source)
        compared = [each for each in weights.names if each in theirs]
        for each in compared:
            np.testing.assert_allclose(weights.read(each), theirs[each].numpy(), rtol=1e-5, atol=1e-6)
        assert {each for each in weights.names if weights.is_changed(each)} <= {*compared}  # experts have other names
    with safe_open(tmp_path / "merged" / "model.safetensors", "np") as file:
        assert ("lm_head.weight" in file.keys()) == has_head  # noqa: SIM118
    says_so = any("head has a weight of its own" in note for note in exported.notes)
    assert says_so == (has_head and name in ("tied", "scaled"))
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {*exported.files}


@pytest.mark.parametrize(("name", "whole"), [("tied", False), slow_case("untied", False), ("untied", True)])
def test_new_tokens_are_rows_of_the_merged_model(name: str, whole: bool, tmp_path: Path) -> None:
    tokens = tokens_with(tuple(NEW))
    options: dict[str, Any] = {"target_modules": ["q_proj"]}
    if whole:
        options["modules_to_save"] = ["embed_tokens", "lm_head"]
    else:
        options["trainable_token_indices"] = NEW if name == "tied" else {"embed_tokens": NEW, "lm_head": NEW}
    source, adapted = source_of(tmp_path, name, options, num_new=2)
    expected = logits_of(adapted, tokens)
    export_merged(source, tmp_path / "merged")
    model = loaded(tmp_path / "merged")
    assert distance(logits_of(model, tokens), expected) < SAME
    assert model.config.vocab_size == VOCABULARY + 2 == model.get_input_embeddings().weight.shape[0]


def test_rows_and_chunks_are_those_of_the_whole_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**LINEAR, "use_dora": True, "trainable_token_indices": NEW}
    source, _ = source_of(tmp_path, "tied", options, num_new=2)
    weights = MergedWeights(source)
    whole = {name: weights.read(name) for name in weights.names}
    monkeypatch.setattr("trillora.export.merged_weights.CHUNK_BYTES", 4 * 16 * 3)
    for name, array in whole.items():
        pieces = list(weights.chunks(name))
        np.testing.assert_allclose(np.concatenate(pieces), array, rtol=1e-6)
        assert len(pieces) > 1 or array.shape[0] <= 48
        assert array.shape == weights.shape(name) and array.dtype == np.float32
    np.testing.assert_array_equal(
        weights.rows("model.embed_tokens.weight", 39, 42)[1:], whole["model.embed_tokens.weight"][40:]
    )


def test_shards_are_small_and_have_an_index(tmp_path: Path) -> None:
    source, adapted = source_of(tmp_path, "untied", LINEAR)
    events: list[Any] = []
    exported = export_merged(source, tmp_path / "merged", max_shard_bytes=4000, listener=events.append)
    shards = [name for name in exported.files if name.endswith(".safetensors")]
    index = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())
    assert len(shards) > 3 and {*index["weight_map"].values()} == {*shards}
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in torch_base("untied").parameters())
    expected = logits_of(adapted, tokens_with(()))
    assert distance(logits_of(loaded(tmp_path / "merged"), tokens_with(())), expected) < SAME
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert last.done == last.total


@pytest.mark.parametrize(("dtype", "code"), [(None, "BF16"), ("float16", "F16"), ("float32", "F32")])
def test_the_type_is_that_of_the_base_or_the_given_one(dtype: str | None, code: str, tmp_path: Path) -> None:
    source, _ = source_of(tmp_path, "tied", {"target_modules": ["q_proj"]}, dtype=torch.bfloat16)
    export_merged(source, tmp_path / "merged", dtype=dtype)
    weights = MergedWeights(source)
    with (
        safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file,
        safe_open(tmp_path / "base" / "model.safetensors", "pt") as base,
    ):
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {code}  # noqa: SIM118
        for name in file.keys():  # noqa: SIM118
            expected = torch.tensor(weights.read(name)).to(file.get_tensor(name).dtype)
            assert torch.equal(file.get_tensor(name), expected), name
            if dtype is None and "q_proj" not in name:
                assert torch.equal(file.get_tensor(name), base.get_tensor(name))
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config["dtype"] == (dtype or "bfloat16")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template


def test_values_that_float16_cannot_hold_are_refused(tmp_path: Path) -> None:
    source, _ = source_of(tmp_path, "tied", {"target_modules": ["q_proj"]})
    name = next(name for name in source.matrices if name.endswith("lora_b"))
    large = replace(source, matrices={**source.matrices, name: source.matrices[name] * 1e6})
    with pytest.raises(TrilloraError, match="which float16 cannot hold") as caught:
        export_merged(large, tmp_path / "merged", dtype="float16")
    assert "bfloat16" in caught.value.do
    assert not (tmp_path / "merged").exists() and sorted(e.name for e in tmp_path.iterdir()) == ["adapter", "base"]
    export_merged(large, tmp_path / "merged", dtype="bfloat16")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = source_of(tmp_path, "tied", {"target_modules": ["q_proj"]})
    written: list[str] = []

    def full(path: Path, *arguments: Any) -> None:
        if written:
            raise OSError(28, "No space left on device", str(path))
        written.append(path.name)
        path.write_bytes(b"half")

    monkeypatch.setattr(merged, "write_tensors", full)
    with pytest.raises(TrilloraError, match="No space left on device"):
        export_merged(source, tmp_path / "merged", max_shard_bytes=4000)
    assert len(written) == 1 and sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_folder_with_files_is_refused_and_an_empty_one_is_used(tmp_path: Path) -> None:
    source, _ = source_of(tmp_path, "tied", {"target_modules": ["q_proj"]})
    (tmp_path / "merged").mkdir()
    export_merged(source, tmp_path / "merged")
    with pytest.raises(TrilloraError, match="already exists"):
        export_merged(source, tmp_path / "merged")


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    source, _ = source_of(tmp_path, "tied", {"target_modules": ["q_proj"]})
    name = next(name for name in source.matrices if name.endswith("lora_b"))
    wrong = replace(source, matrices={**source.matrices, name: source.matrices[name][:-1]})
    with pytest.raises(TrilloraError, match="does not fit this model"):
        export_merged(wrong, tmp_path / "merged")


def test_a_multimodal_model_keeps_its_wrapper_and_its_vision_tower(tmp_path: Path) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_models.configuration("gemma3_text").to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=255)
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "base")
    adapted = quiet_peft(model, target_modules=r".*language_model.*\.(q_proj|down_proj)")
    tokens = tokens_with(())
    expected = logits_of(adapted, tokens)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(tmp_path / "adapter")
    export_merged(open_folder(tmp_path), tmp_path / "merged")
    again, info = Gemma3ForConditionalGeneration.from_pretrained(
        tmp_path / "merged", dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert distance(logits_of(again, tokens), expected) < SAME
    with (
        safe_open(tmp_path / "merged" / "model.safetensors", "np") as file,
        safe_open(tmp_path / "base" / "model.safetensors", "np") as base,
    ):
        assert {*file.keys()} == {*base.keys()}
        vision_names = [name for name in base.keys() if "vision" in name]  # noqa: SIM118
        assert vision_names
        for name in vision_names:
            np.testing.assert_array_equal(file.get_tensor(name), base.get_tensor(name))


def write_quantized(folder: Path, quantize: Any, **about: Any) -> dict[str, torch.Tensor]:
    """Replaces the linear weights of a base by the tensors that `quantize` makes of them. Returns the others."""
    tensors = load_file(folder / "model.safetensors")
    changed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        is_linear = name.endswith("_proj.weight")
        changed |= {f"{name}{end}": part for end, part in quantize(tensor).items()} if is_linear else {name: tensor}
    save_file(changed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": about}))
    return tensors


def test_a_base_in_float8_is_dequantized_and_that_is_said(tmp_path: Path) -> None:
    source_of(tmp_path, "untied", {"target_modules": ["q_proj"]})
    expected = {}

    def quantize(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = weight.reshape(weight.shape[0] // 8, 8, weight.shape[1] // 8, 8)
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        whole = (codes.float() * scale[:, None, :, None]).reshape(weight.shape)
        expected[len(expected)] = whole
        return {"": codes.reshape(weight.shape), "_scale_inv": scale}

    write_quantized(tmp_path / "base", quantize, quant_method="fp8")
    source = open_folder(tmp_path)
    exported = export_merged(source, tmp_path / "merged", dtype="float32")
    assert any("float8" in note and "dequantized" in note for note in exported.notes)
    model = loaded(tmp_path / "merged")
    assert not hasattr(model.config, "quantization_config")
    merged_linear = [p for name, p in model.named_parameters() if name.endswith("_proj.weight")]
    same = sum(any(torch.equal(p, whole) for whole in expected.values()) for p in merged_linear)
    assert same == len(merged_linear) - 2 and len(expected) == len(merged_linear)  # all but the adapted q_proj


@full_dose_only
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """1.1 GB of weights, 200 MB of them in one tensor, need less than 400 MB more than the libraries."""
    command = [sys.executable, str(Path(__file__).parents[1] / "support" / "merge_in_little_memory.py"), str(tmp_path)]
    sizes = ["12", "1536", "65536"]
    subprocess.run([*command, *sizes], check=True)
    done = subprocess.run([*command, *sizes], check=True, capture_output=True, text=True)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["model_mb"] > 800 and facts["peak_mb"] - facts["before_mb"] < 400, facts
