"""GGUF files, read by llama.cpp itself: it computes what transformers and PEFT compute, and makes the same prompts."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf_models
import numpy as np
import pytest
import torch
from dose import full_dose_only, slow_case
from gguf import GGUFReader, dequantize
from gguf_models import MODELS, log_probs, prompts_for, source_of
from llama_cpp import LlamaCpp
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3Config, Gemma3ForConditionalGeneration

from trillora.errors import TrilloraError
from trillora.events import Progress
from trillora.export.gguf import tensors, write
from trillora.export.gguf.families import FAMILIES, describe, family_of
from trillora.export.gguf.lora import export_lora_gguf
from trillora.export.gguf.quantize import TYPES, byte_shape
from trillora.export.gguf.tensors import plan_tensors
from trillora.export.gguf.write import export_gguf
from trillora.export.merged_weights import MergedWeights
from trillora.export.source import ExportSource
from trillora.model.loading.source import OpenModel, load_config

pytestmark = pytest.mark.filterwarnings("ignore:builtin type (SwigPy|swig)")

# Of log-probabilities. float32 sums in another order; llama.cpp looks GELU up in a table of half precision.
SAME, SAME_WITH_GELU = 1e-4, 5e-3
DIFFERENT = 0.1  # a mistake in one kind of tensor changes more than this
CHAT = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "The capital of France is Paris."},
    {"role": "user", "content": "add(a, b)\n  twice,  please"},
]
# Every architecture of llama.cpp once; variants at full dose.
VARIANTS = {
    *("llama-wide", "llama-biases", "llama-linear", "llama-yarn", "mistral", "qwen2-yarn", "qwen2_moe", "qwen3"),
    *("gemma", "phi3"),
}


def difference(gguf: Path, expected: np.ndarray, prompts: list[list[int]], **options: Any) -> float:
    with LlamaCpp(gguf, **options) as reader:
        return float(np.abs(reader.log_probs(prompts) - expected).max())


def exported(source: ExportSource, out: Path, type: str = "f32") -> Path:
    result = export_gguf(source, out, type=type)
    assert [entry.name for entry in out.iterdir()] == [*result.files]
    return out / result.files[0]


@pytest.mark.parametrize("name", [slow_case(name) if name in VARIANTS else name for name in MODELS])
def test_llama_cpp_computes_and_prompts_as_transformers(name: str, tmp_path: Path) -> None:
    source, model = source_of(name, tmp_path)
    prompts, tokenizer = prompts_for(name), source.base.tokenizer
    expected = log_probs(model, prompts)
    with model.disable_adapter():
        assert np.abs(log_probs(model, prompts) - expected).max() > DIFFERENT
    with LlamaCpp(exported(source, tmp_path / "out")) as reader:
        found = reader.log_probs(prompts)
        chat = reader.token_ids(reader.chat_prompt(CHAT))
        text = reader.token_ids("The capital\nof 12 naïve foxes")
    assert found.shape == expected.shape  # the whole vocabulary
    assert np.abs(found - expected).max() < (SAME_WITH_GELU if name.startswith("gemma") else SAME)
    assert chat == tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    if MODELS[name][1] != "mistral":  # its tokenizer puts a space before text, but not after a special token
        assert text == tokenizer("The capital\nof 12 naïve foxes")["input_ids"]


@pytest.mark.parametrize(
    ("name", "mistake"), [("llama", "permutation"), ("gemma3", "norms"), ("llama3", "frequencies")]
)
def test_a_mistake_would_be_noticed(name: str, mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, model = source_of(name, tmp_path)
    prompts = prompts_for(name)
    match mistake:
        case "permutation":
            monkeypatch.setattr(tensors, "permuted", lambda array, num_heads: array)
        case "norms":
            family = dataclasses.replace(FAMILIES["gemma3_text"], norm_offset=0.0)
            monkeypatch.setitem(FAMILIES, "gemma3_text", family)
        case "frequencies":
            source.base.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    assert difference(exported(source, tmp_path / "out"), log_probs(model, prompts), prompts) > DIFFERENT


def test_half_precision_is_within_its_rounding(tmp_path: Path) -> None:
    source, model = source_of("qwen3", tmp_path)
    prompts = prompts_for("qwen3")
    expected = log_probs(model, prompts)
    # 11 bits for values of both weights and activations, against 24 in float32; measured 0.005 on SmolLM2.
    assert SAME < difference(exported(source, tmp_path / "out", "f16"), expected, prompts) < 0.02


# Largest error in one block of 32 as a part of its largest value, and of all values relative to their size (RMS). The
# bounds are half a step of the type; q4_0 and q5_0 cut off the end of one side, which makes it a whole step. Scale and
# minimum of a block are rounded to float16, which is a part of the largest value too.
HALF = 2**-11
ERRORS = {
    "f32": (0.0, 0.0),
    "f16": (HALF, HALF),
    "bf16": (2**-8, 2**-8),
    "q8_0": (0.5 / 127 + HALF, 0.01),
    "q5_1": (1 / 31 + 3 * HALF, 0.05),
    "q5_0": (1 / 16 + HALF, 0.06),
    "q4_1": (1 / 15 + 3 * HALF, 0.1),
    "q4_0": (1 / 8 + HALF, 0.12),
    "q4_k_m": (1 / 8, 0.1),
}


def dequantized(model: Any, file: Path, source: ExportSource) -> Any:
    """The model in transformers with the weights of the file."""
    config = source.base.config
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    plain = model.merge_and_unload()
    state = plain.state_dict()
    for planned in plan_tensors(FAMILIES["llama"], config, MergedWeights(source)):
        tensor = tensors[planned.name]
        array = dequantize(tensor.data, tensor.tensor_type).reshape(planned.shape)
        for letter, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f"attn_{letter}." in planned.name:  # from pairs back to halves
                array = array.reshape(heads, -1, 2, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        state[planned.parts[0].stored].copy_(torch.from_numpy(array.copy()))
    return plain


@pytest.mark.parametrize("type", [type if type in ("q8_0", "q4_0", "q4_k_m") else slow_case(type) for type in TYPES])
def test_each_quantized_tensor_is_within_the_error_of_its_type(type: str, tmp_path: Path) -> None:
    source, model = source_of("llama-wide", tmp_path)
    file = exported(source, tmp_path / "out", type)
    weights = MergedWeights(source)
    config = source.base.config
    planned = {each.name: each for each in plan_tensors(FAMILIES["llama"], config, weights)}
    reader = GGUFReader(file)
    assert {tensor.name for tensor in reader.tensors} == planned.keys()
    of_block, of_all = ERRORS[type]
    types = {tensor.tensor_type.name for tensor in reader.tensors}
    for tensor in reader.tensors:
        expected = np.concatenate([each.ravel() for each in planned[tensor.name].arrays(weights)])
        found = dequantize(tensor.data, tensor.tensor_type).ravel()
        if tensor.tensor_type.name == "F32":
            np.testing.assert_array_equal(found, expected)
            continue
        blocks, errors = expected.reshape(-1, 32), (found - expected).reshape(-1, 32)
        largest = np.abs(blocks).max(axis=1)
        assert (np.abs(errors).max(axis=1) <= of_block * largest + 1e-7).all(), tensor.name
        assert np.linalg.norm(errors) <= of_all * np.linalg.norm(blocks), tensor.name
    assert type.upper() in types if type != "q4_k_m" else {"Q4_K", "Q6_K"} <= types
    prompts = prompts_for("llama-wide")
    expected_log = log_probs(dequantized(model, file, source), prompts)
    with LlamaCpp(file) as llama:
        found_log = llama.log_probs(prompts)
    found_log -= np.log(np.exp(found_log).sum(-1, keepdims=True))  # their sum is 1 in float32 only
    # In nats. llama.cpp also rounds activations, to 8 bits in blocks, which gave up to 0.06 with these random weights.
    # The weights before quantization are 1.6 away with q4_0.
    assert float((np.exp(expected_log) * (expected_log - found_log)).sum(-1).max()) < 0.1


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama3", {"use_rslora": True, "rank_pattern": {"k_proj": 2}, "alpha_pattern": {"layers.0.mlp.down_proj": 3}}),
        slow_case("gemma3", {}),
        slow_case("mixtral", {}),
        ("phi3", {"use_rslora": True}),
    ],
)
def test_base_and_lora_file_compute_what_peft_computes(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    source, model = source_of(name, tmp_path, **options)
    prompts = prompts_for(name)
    expected = log_probs(model, prompts)
    unchanged = {key: np.zeros_like(array) for key, array in source.matrices.items()}
    base = exported(dataclasses.replace(source, matrices=unchanged), tmp_path / "base-gguf")
    lora = tmp_path / "lora" / export_lora_gguf(source, tmp_path / "lora").files[0]
    assert difference(base, expected, prompts) > DIFFERENT
    allowed = SAME_WITH_GELU if name.startswith("gemma") else SAME
    assert difference(base, expected, prompts, lora=lora) < allowed


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
        slow_case({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
        {"target_modules": ["q_proj"], "trainable_token_indices": [3, 5]},
    ],
)
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_other_parts_of_an_adapter_are_merged(options: dict[str, Any], tmp_path: Path) -> None:
    source, model = source_of("llama", tmp_path, **options)
    prompts = [*prompts_for("llama"), [3, 5, 7]]
    assert difference(exported(source, tmp_path / "out"), log_probs(model, prompts), prompts) < SAME


@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_a_head_that_llama_cpp_would_not_read_is_refused(tmp_path: Path) -> None:
    source, _ = source_of("gemma2", tmp_path, target_modules=["q_proj", "lm_head"])
    with pytest.raises(TrilloraError, match="no place for lm_head"):
        export_gguf(source, tmp_path / "out", type="f16")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["lm_head"]}, "as a whole"),
        ({"trainable_token_indices": [3]}, "tokens"),
        ({"target_modules": ["q_proj", "lm_head"]}, "head alone"),
    ],
)
@pytest.mark.filterwarnings("ignore:Model with `tie_word_embeddings=True`")
def test_what_a_lora_file_cannot_hold_is_refused(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    source, _ = source_of("llama", tmp_path, **options)
    with pytest.raises(TrilloraError, match=reason) as raised:
        export_lora_gguf(source, tmp_path / "lora")
    assert "--to gguf" in raised.value.do
    assert not (tmp_path / "lora").exists()


@pytest.mark.parametrize("name", ["mixtral", slow_case("qwen3_moe")])
def test_experts_stored_together_give_the_same_file(name: str, tmp_path: Path) -> None:
    """transformers stores each expert; some checkpoints have them as in memory."""
    source, _ = source_of(name, tmp_path)
    separate = exported(source, tmp_path / "separate").read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    fused = {key: value.contiguous() for key, value in model.state_dict().items()}
    assert any(key.endswith("experts.gate_up_proj") for key in fused)
    save_file(fused, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    together = GGUFReader(exported(source, tmp_path / "together"))
    (tmp_path / "copy.gguf").write_bytes(separate)
    others = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "copy.gguf").tensors}
    assert others.keys() == {tensor.name for tensor in together.tensors}
    for tensor in together.tensors:
        np.testing.assert_array_equal(tensor.data, others[tensor.name].data)


@full_dose_only
def test_the_text_part_of_a_multimodal_model(tmp_path: Path) -> None:
    _, tokenizer_name, options = MODELS["gemma3"]
    tokenizer = gguf_models.tokenizer_of(tokenizer_name)
    text = {**gguf_models.SIZES, **options, "vocab_size": len(tokenizer)}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration._from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "base")
    source, _ = source_of("gemma3", tmp_path / "other")
    none = {key: array * 0 for key, array in source.matrices.items()}
    matrices = {key.replace("model.layers", "model.language_model.layers"): array for key, array in none.items()}
    targets = tuple(sorted({key.rsplit(".", 1)[0] for key in matrices}))
    base = OpenModel(tmp_path / "base", load_config(tmp_path / "base"), tokenizer, "some/gemma")
    spec = dataclasses.replace(source.spec, targets=targets)
    source = dataclasses.replace(source, base=base, matrices=matrices, spec=spec)
    prompts = prompts_for("gemma3")
    assert difference(exported(source, tmp_path / "out"), log_probs(model, prompts), prompts) < SAME_WITH_GELU


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "query_pre_attn_scalar": ("gemma2", {"query_pre_attn_scalar": 99}),
    "attn_logit_softcapping": ("gemma2", {"attn_logit_softcapping": None}),
    "soft caps": ("llama", {"final_logit_softcapping": 30.0}),
    "sliding window do not repeat": ("gemma3", {"layer_types": ["full_attention", *["sliding_attention"] * 6]}),
    "none of its layers": ("gemma3", {"layer_types": ["full_attention"] * 7}),
    "norm_topk_prob": ("qwen3_moe", {"norm_topk_prob": False}),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "activation": ("llama", {"hidden_act": "gelu"}),
    "rope type 'dynamic'": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "rope type 'llama3'": ("qwen2", gguf_models.LLAMA3),
    "attention_factor": ("llama", gguf_models.rotary("yarn", factor=4.0, attention_factor=3.0)),
    "truncate": ("llama", gguf_models.rotary("yarn", factor=4.0, truncate=False)),
    "partial_rotary_factor": ("llama", gguf_models.rotary("default", partial_rotary_factor=0.5)),
    "use_bidirectional_attention": ("gemma", {"use_bidirectional_attention": True}),
    "head_dim": ("phi3", {"head_dim": 32}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_options_that_llama_cpp_would_ignore_are_refused(reason: str) -> None:
    name, options = REFUSED[reason]
    config = gguf_models.config_of(name)
    describe(family_of(config), config, 100)
    for option, value in options.items():
        setattr(config, option, value)
    with pytest.raises(TrilloraError, match=reason) as raised:
        describe(family_of(config), config, 100)
    assert "--to merged" in raised.value.do


def test_an_unknown_architecture_is_refused_with_the_families(tmp_path: Path) -> None:
    source, _ = source_of("llama", tmp_path)
    source.base.config.model_type = "gpt_neox"
    with pytest.raises(TrilloraError, match="gpt_neox") as raised:
        export_gguf(source, tmp_path / "out", type="f16")
    assert all(family.title in raised.value.do for family in FAMILIES.values())


@pytest.mark.parametrize("name", ["mistral", "qwen2", "phi3"])
def test_a_window_that_llama_cpp_ignores_limits_the_context(name: str) -> None:
    config = gguf_models.config_of(name)
    family = family_of(config)
    assert describe(family, config, 100).values[f"{family.arch}.context_length"] == 256
    config.sliding_window, config.use_sliding_window = 50, True
    config.layer_types = ["full_attention", "sliding_attention"]
    described = describe(family, config, 100)
    assert described.values[f"{family.arch}.context_length"] == 50
    assert "50 tokens instead of 256" in described.notes[0]


def test_bad_types_and_values_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = source_of("llama", tmp_path)
    with pytest.raises(TrilloraError, match="not a type") as raised:
        export_gguf(source, tmp_path / "out", type="q3")
    assert "q4_k_m" in raised.value.do
    for value, do in ((1e7, "bf16"), (np.nan, "diverged")):
        broken = {key: array.copy() for key, array in source.matrices.items()}
        next(iter(broken.values()))[0, 0] = value
        with pytest.raises(TrilloraError, match="cannot hold") as raised:
            export_gguf(dataclasses.replace(source, matrices=broken), tmp_path / "out", type="f16")
        assert do in raised.value.do

    def full_disk(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(write, "to_bytes", full_disk)
    with pytest.raises(TrilloraError, match="No space left"):
        export_gguf(source, tmp_path / "out", type="f16")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["adapter", "base"]


def test_memory_holds_one_piece_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors are converted in pieces, with the same bytes; progress reaches the size of all tensors."""
    source, _ = source_of("llama-wide", tmp_path)
    whole = exported(source, tmp_path / "whole", "q8_0").read_bytes()
    monkeypatch.setattr(tensors, "MAX_CHUNK", 1000)
    sizes: list[int] = []
    convert = write.to_bytes
    monkeypatch.setattr(write, "to_bytes", lambda array, *rest: (sizes.append(array.size), convert(array, *rest))[1])
    events: list[Any] = []
    export_gguf(source, tmp_path / "pieces", type="q8_0", listener=events.append)
    assert (tmp_path / "pieces" / "model-q8_0.gguf").read_bytes() == whole
    largest = max(size for size in sizes)
    assert largest == 256 * 256  # the query projection, whose rows are reordered
    last = [event for event in events if isinstance(event, Progress)][-1]
    assert last.done == last.total > 0
    assert len(sizes) > 500


def test_sizes_of_the_types() -> None:
    from gguf import GGMLQuantizationType

    assert byte_shape((4, 64), GGMLQuantizationType.Q8_0) == (4, 68)
    assert byte_shape((4, 64), GGMLQuantizationType.F32) == (4, 256)


SECOND_READER = """
import json, sys
from mistralrs import ChatCompletionRequest, Runner, Which

folder, file, question = sys.argv[1:]
runner = Runner(which=Which.GGUF(quantized_model_id=folder, quantized_filename=file))
messages = [{"role": "user", "content": question}]
request = ChatCompletionRequest(
    model="default", messages=messages, max_tokens=8, logprobs=True, top_logprobs=5, temperature=0.0
)
answer = runner.send_chat_completion_request(request).choices[0]
first = answer.logprobs.content[0].top_logprobs
print("@answer " + json.dumps([answer.message.content, [(each.token, each.logprob) for each in first]]))
"""


@full_dose_only
def test_a_second_reader_agrees_on_a_real_model(tmp_path: Path) -> None:
    """mistral.rs reads GGUF with code of its own, in Rust: tokenizer, template, permutation and numbers."""
    pytest.importorskip("mistralrs")
    opened = OpenModel.open("smollm2", revision=None, trust_remote_code=False)
    other, _ = source_of("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(opened.folder, dtype=torch.float32).eval()
    target = "model.layers.0.self_attn.q_proj"
    rng = np.random.default_rng(0)
    a_RD, b_ER = (0.05 * rng.standard_normal(shape).astype(np.float32) for shape in ((4, 576), (576, 4)))
    model.get_parameter(f"{target}.weight").data += torch.from_numpy(2 * b_ER @ a_RD)
    spec = dataclasses.replace(other.spec, targets=(target,))
    matrices = {f"{target}.lora_a": a_RD, f"{target}.lora_b": b_ER}
    source = dataclasses.replace(other, base=opened, matrices=matrices, spec=spec)
    file = exported(source, tmp_path / "out")
    question = "What is the capital of France?"
    command = [sys.executable, "-c", SECOND_READER, str(file.parent), file.name, question]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    text, first = json.loads(next(line for line in lines if line.startswith("@answer ")).removeprefix("@answer "))
    chat = [{"role": "user", "content": question}]
    ids = opened.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
        answer = model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False)[0, len(ids) :]
    assert text == opened.tokenizer.decode(answer, skip_special_tokens=True)
    expected = log_probs(model, [ids])[0]
    assert len(first) == 5
    for token, log_prob in first:
        assert abs(expected[token] - log_prob) < 0.01  # float32 sums in another order, over 30 layers
