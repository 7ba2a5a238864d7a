"""Checkpoints that are stored quantized load as transformers dequantizes them, bit for bit; unknown ones are refused.

The references: transformers' own code for MXFP4 and fp8; numbers of bitsandbytes in `golden/`. The packages for GPTQ,
AWQ and compressed-tensors are not installed here, so their formats are written out one weight at a time.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from dose import dose
from hostile_json import changed_bytes
from loaded_weights import as_float, layout_of, llama, meta_model, sharded, whole
from safetensors.torch import load_file, save_file
from stored_formats import (
    BITSANDBYTES,
    COMPRESSED,
    FP8,
    KEPT,
    Quantize,
    Tensors,
    channels,
    float8,
    golden,
    int8,
    nf4,
    random_bytes,
)
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GPT2Config,
    GptOssConfig,
    Mxfp4Config,
    Qwen3MoeConfig,
)

from trillora.engine.quantize import dequantize
from trillora.errors import TrilloraError
from trillora.events import Note
from trillora.model.bridge import CausalLM
from trillora.model.layout import unstack
from trillora.model.loading.source import find_model, load_config
from trillora.model.loading.stored import packed as packed_module
from trillora.model.loading.stored.bitsandbytes import FourBits
from trillora.model.loading.stored.integers import Awq
from trillora.model.loading.stored.method import read_method
from trillora.model.loading.stored.mxfp4 import Mxfp4
from trillora.model.loading.stored.packed import Stored, opened_tensor
from trillora.model.loading.stored.scaled import Scaled
from trillora.model.loading.weights import load_weights, resolve_sources

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}


def write(
    folder: Path, config: Any, quantize: Quantize, about: dict[str, Any], chosen: str = "_proj.weight"
) -> Tensors:
    """A checkpoint in which weights with `chosen` in their names are replaced by what `quantize` makes of them. Returns
    the unquantized tensors."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    stored: Tensors = {}
    for name, tensor in tensors.items():
        stored |= quantize(name, tensor) if chosen in name and "bias" not in name else {name: tensor}
    assert len(stored) > len(tensors)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, "quantization_config": about}))
    return tensors


def load(folder: Path, config: Any, dtype: str = "bfloat16") -> tuple[dict[str, np.ndarray], list[str]]:
    """All weights by name, read on a mesh of eight devices; and what was said."""
    notes: list[str] = []
    module = meta_model(config, getattr(torch, dtype))
    layout = layout_of(module, jnp.dtype(dtype), stacked=True, drop=("model.rotary_emb.inv_freq",))
    layout.pop("model.rotary_emb.original_inv_freq", None)
    tree = load_weights(
        folder,
        module,
        layout,
        sharded(layout),
        lambda event: notes.append(event.text) if isinstance(event, Note) else None,
    )
    return {name: as_float(array) for name, array in unstack(tree, layout).items()}, notes


def small(**changes: Any) -> Any:
    return llama(num_hidden_layers=1, **changes)


# ---- transformers' own code


def mxfp4(name: str, weight: torch.Tensor) -> Tensors:
    experts, inputs, outputs = weight.shape
    scales = random_bytes((experts, outputs, inputs // 32), 117, 128)
    return {f"{name}_blocks": random_bytes((experts, outputs, inputs // 32, 16)), f"{name}_scales": scales}


def gpt_oss() -> GptOssConfig:
    return GptOssConfig(**SIZES, num_local_experts=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def qwen3_moe() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, decoder_sparse_step=2,
    )  # fmt: skip


def fp4_experts(name: str, weight: torch.Tensor) -> Tensors:
    """Experts as in DeepSeek-V4, other weights in float8."""
    if ".experts." not in name:
        return float8(32, 32)(name, weight)
    outputs, inputs = weight.shape
    scale = random_bytes((outputs, inputs // 32), 117, 128).view(torch.float8_e8m0fnu)
    return {name: random_bytes((outputs, inputs // 2)).view(torch.int8), f"{name}_scale_inv": scale}


CASES: dict[str, tuple[Any, Quantize, dict[str, Any], str]] = {
    "mxfp4": (gpt_oss, mxfp4, {"quant_method": "mxfp4"}, "MXFP4"),
    "blocks": (llama, float8(32, 32), FP8, "float8"),
    "experts": (qwen3_moe, float8(32, 32), FP8, "float8"),  # one by one in the files, fused in the model
    "experts in FP4": (qwen3_moe, fp4_experts, FP8, "MXFP4 and float8"),
    "one scale": (small, float8(0, 0), {**FP8, "weight_block_size": None}, "float8"),
    "other name": (small, float8(32, 32, "qscale_weight", torch.bfloat16), FP8, "float8"),
    "exponents": (small, float8(32, 32, "scale", torch.float8_e8m0fnu), {**FP8, "scale_fmt": "ue8m0"}, "float8"),
    "mxfp8": (small, float8(1, 32, kind=torch.uint8), {**FP8, "quant_method": "mxfp8"}, "MXFP8"),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_equal_those_that_transformers_dequantizes(name: str, tmp_path: Path) -> None:
    make, quantize, about, label = CASES[name]
    write(tmp_path, make(), quantize, about, "experts." if name == "mxfp4" else "_proj.weight")
    options: Any = Mxfp4Config(dequantize=True)
    if name != "mxfp4":
        options = FineGrainedFP8Config(**{**about, "dequantize": True})
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=options)
    expected = reference.state_dict()
    found, notes = load(tmp_path, make())
    for parameter, array in found.items():
        np.testing.assert_array_equal(array, expected[parameter].float().numpy(), err_msg=parameter)
    assert len(found) >= 12 and all(array.any() for name, array in found.items() if "bias" not in name)
    assert notes == [f"The base is stored in {label}: dequantized to bfloat16 while loading"]


def test_a_smaller_last_block_has_its_own_scale(tmp_path: Path) -> None:
    """transformers refuses these shapes, or splits them evenly; kernels for FP8 take blocks of the configured size."""
    write(tmp_path, small(), float8(40, 24), {**FP8, "weight_block_size": [40, 24]})
    stored, (found, _) = load_file(tmp_path / "model.safetensors"), load(tmp_path, small(), "float32")
    compared = 0
    for name, codes in stored.items():
        if codes.dtype != torch.float8_e4m3fn:
            continue
        scale = stored[f"{name}_scale_inv"].numpy()
        for (row, column), value in np.ndenumerate(codes.float().numpy()[:96:7, :64:5]):
            row, column = 7 * row, 5 * column
            assert found[name][row, column] == value * scale[row // 40, column // 24]
        compared += 1
    assert compared == 7


# ---- formats of packages that are not installed here


def plain_nf4(stored: Tensors, name: str) -> np.ndarray:
    """The definition, in float32 and rounded to bfloat16 at the end: what bitsandbytes' kernel computes."""
    codes = stored[name].numpy().ravel()
    absmax = stored[f"{name}.absmax"].numpy()
    if f"{name}.nested_absmax" in stored:
        scales = stored[f"{name}.nested_absmax"].numpy()
        table = stored[f"{name}.nested_quant_map"].numpy()
        absmax = np.array([table[a] * scales[n // 256] + np.float32(0.03125) for n, a in enumerate(absmax)], np.float32)
    table = stored[f"{name}.quant_map"].numpy()
    values = np.empty(2 * len(codes), np.float32)
    values[0::2], values[1::2] = table[codes >> 4], table[codes & 15]
    return torch.tensor(values * np.repeat(absmax, 64)).bfloat16().float().numpy()


@pytest.mark.parametrize("nested", [True, False])
def test_nf4_of_bitsandbytes_is_what_its_definition_gives(nested: bool, tmp_path: Path) -> None:
    about = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    write(tmp_path, small(), lambda name, weight: nf4(name, weight, nested=nested), about)
    stored, (found, notes) = load_file(tmp_path / "model.safetensors"), load(tmp_path, small())
    names = [name for name in found if name.endswith("_proj.weight")]
    for name in names:
        np.testing.assert_array_equal(found[name].ravel(), plain_nf4(stored, name))
    assert len(names) == 7 and notes == ["The base is stored in nf4: dequantized to bfloat16 while loading"]


def test_nf4_equals_numbers_of_bitsandbytes(tmp_path: Path) -> None:
    codes, first = golden("codes_uint8", "u1"), golden("first_rows_float32", "f4")
    config = small(intermediate_size=2 * codes.numel() // 64)
    state = {"shape": [config.intermediate_size, 64], "blocksize": 64, "nested_blocksize": 256}
    state["nested_offset"] = BITSANDBYTES["absmax_mean"]
    parts = {
        "": codes[:, None],
        ".absmax": golden("absmax_uint8", "u1"),
        ".quant_map": torch.tensor(BITSANDBYTES["nf4"]),
        ".nested_absmax": torch.tensor(BITSANDBYTES["absmax_scale"]),
        ".nested_quant_map": golden("dynamic_float32", "f4"),
        ".quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    about = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    name = "model.layers.0.mlp.up_proj.weight"
    write(tmp_path, config, lambda _, __: {name + end: part for end, part in parts.items()}, about, "up_proj.weight")
    found, _ = load(tmp_path, config, "float32")
    np.testing.assert_array_equal(found[name].ravel()[: first.numel()], first.numpy())


def plain_int8(stored: Tensors, name: str) -> np.ndarray:
    scale = stored[f"{name.removesuffix('weight')}SCB"]
    return (stored[name] * scale.view(-1, 1) * 7.874015718698502e-3).bfloat16().float().numpy()


def gptq(version: str, shuffled: bool) -> Quantize:
    """Random codes: 4 bits, 32 inputs in a group; with `shuffled`, any input may be in any group."""

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        outputs, inputs = weight.shape
        groups = torch.arange(inputs, dtype=torch.int32) // 32
        order = torch.randperm(inputs) if shuffled else torch.arange(inputs)
        parts = {
            "qweight": torch.randint(-(2**31), 2**31, (inputs // 8, outputs), dtype=torch.int64).int(),
            "qzeros": torch.randint(-(2**31), 2**31, (inputs // 32, outputs // 8), dtype=torch.int64).int(),
            "scales": (torch.rand(inputs // 32, outputs) / 16).half(),
            "g_idx": groups[order],
        }
        return {name.removesuffix("weight") + end: part for end, part in parts.items()}

    return quantize


def nibble(number: int, place: int) -> int:
    return (int(number) >> (4 * place)) & 15


def plain_gptq(stored: Tensors, name: str, output: int, input_: int, *, plus: int = 1) -> np.float16:
    layer = name.removesuffix("weight")
    parts = {end: stored[layer + end].numpy() for end in ("qweight", "qzeros", "scales", "g_idx")}
    group = parts["g_idx"][input_]
    code = nibble(parts["qweight"][input_ // 8, output], input_ % 8)
    zero = (nibble(parts["qzeros"][group, output // 8], output % 8) + plus) % 16
    return np.float16(code - zero) * parts["scales"][group, output]


def awq(name: str, weight: torch.Tensor) -> Tensors:
    outputs, inputs = weight.shape
    parts = {
        "qweight": torch.randint(-(2**31), 2**31, (inputs, outputs // 8), dtype=torch.int64).int(),
        "qzeros": torch.randint(-(2**31), 2**31, (inputs // 32, outputs // 8), dtype=torch.int64).int(),
        "scales": (torch.rand(inputs // 32, outputs) / 16).half(),
    }
    return {name.removesuffix("weight") + end: part for end, part in parts.items()}


def plain_awq(stored: Tensors, name: str, output: int, input_: int) -> np.float16:
    layer = name.removesuffix("weight")
    parts = {end: stored[layer + end].numpy() for end in ("qweight", "qzeros", "scales")}
    place = [0, 2, 4, 6, 1, 3, 5, 7].index(output % 8)
    code = nibble(parts["qweight"][input_, output // 8], place)
    zero = nibble(parts["qzeros"][input_ // 32, output // 8], place)
    return np.float16(code - zero) * parts["scales"][input_ // 32, output]


def packed(name: str, weight: torch.Tensor) -> Tensors:
    outputs, inputs = weight.shape
    parts = {
        "weight_packed": torch.randint(-(2**31), 2**31, (outputs, inputs // 8), dtype=torch.int64).int(),
        "weight_zero_point": torch.randint(-(2**31), 2**31, (outputs // 8, inputs // 32), dtype=torch.int64).int(),
        "weight_scale": (torch.rand(outputs, inputs // 32) / 16).bfloat16(),
        "weight_shape": torch.tensor([outputs, inputs]),
    }
    return {name.removesuffix("weight") + end: part for end, part in parts.items()}


def plain_packed(stored: Tensors, name: str, output: int, input_: int) -> float:
    layer = name.removesuffix("weight")
    code = nibble(stored[f"{layer}weight_packed"][output, input_ // 8], input_ % 8) - 8
    zero = nibble(stored[f"{layer}weight_zero_point"][output // 8, input_ // 32], output % 8) - 8
    return float((code - zero) * stored[f"{layer}weight_scale"][output, input_ // 32])


def plain_channels(stored: Tensors, name: str, output: int, input_: int) -> float:
    return float(stored[name].float()[output, input_] * stored[f"{name}_scale"][output, 0])


def fp4(kind: str) -> Quantize:
    """As compressed-tensors packs it."""

    def quantize(name: str, weight: torch.Tensor) -> Tensors:
        outputs, inputs = weight.shape
        parts = {"weight_packed": random_bytes((outputs, inputs // 2))}
        if kind == "nvfp4":
            parts["weight_scale"] = (torch.rand(outputs, inputs // 16) * 400 + 1).to(torch.float8_e4m3fn)
            parts |= {"weight_global_scale": torch.rand(1) * 5000 + 1, "input_global_scale": torch.ones(1)}
        else:
            parts["weight_scale"] = random_bytes((outputs, inputs // 32), 117, 128)
        return {name.removesuffix("weight") + end: part for end, part in parts.items()}

    return quantize


def plain_fp4(stored: Tensors, name: str, output: int, input_: int) -> float:
    code = nibble(stored[f"{name}_packed"][output, input_ // 2], input_ % 2)
    value = [0, 0.5, 1, 1.5, 2, 3, 4, 6][code % 8] * (-1 if code >= 8 else 1)
    scales = stored[f"{name}_scale"]
    if scales.dtype == torch.uint8:
        return value * 2.0 ** (int(scales[output, input_ // 32]) - 127)
    return float(value * (scales.float()[output, input_ // 16] / stored[f"{name}_global_scale"]))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
INTEGERS: dict[str, tuple[Quantize, dict[str, Any], Any, str]] = {
    "gptq": (gptq("gptq", False), GPTQ, plain_gptq, "GPTQ int4"),
    "gptq with act order": (gptq("gptq", True), {**GPTQ, "desc_act": True}, plain_gptq, "GPTQ int4"),
    "gptq_v2": (
        gptq("gptq_v2", False),
        {**GPTQ, "checkpoint_format": "gptq_v2"},
        lambda *place: plain_gptq(*place, plus=0),
        "GPTQ int4",
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}, plain_awq, "AWQ int4"),
    "compressed-tensors": (packed, COMPRESSED, plain_packed, "int4"),
    "channels": (channels, {**COMPRESSED, "format": "float-quantized"}, plain_channels, "float8"),
    "nvfp4": (fp4("nvfp4"), {**COMPRESSED, "format": "nvfp4-pack-quantized"}, plain_fp4, "NVFP4"),
    "packed mxfp4": (fp4("mxfp4"), {**COMPRESSED, "format": "mxfp4-pack-quantized"}, plain_fp4, "MXFP4"),
    "fbgemm": (channels, {"quant_method": "fbgemm_fp8"}, plain_channels, "float8"),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_weights_are_what_the_definition_of_their_format_gives(name: str, tmp_path: Path) -> None:
    quantize, about, definition, label = INTEGERS[name]
    config = small()
    write(tmp_path, config, quantize, about)
    stored, (found, notes) = load_file(tmp_path / "model.safetensors"), load(tmp_path, config, "float32")
    names = [each for each in found if each.endswith("_proj.weight")]
    for each in names:
        array = found[each]
        for output, input_ in zip(range(0, array.shape[0], 3), range(array.shape[1]), strict=False):
            assert array[output, input_] == np.float32(definition(stored, each, output, input_)), (each, output, input_)
    assert len(names) == 7 and notes == [f"The base is stored in {label}: dequantized to float32 while loading"]


def test_int8_of_bitsandbytes_is_what_its_definition_gives(tmp_path: Path) -> None:
    write(tmp_path, small(), int8, {"load_in_8bit": True})
    stored, (found, _) = load_file(tmp_path / "model.safetensors"), load(tmp_path, small())
    names = [name for name in found if name.endswith("_proj.weight")]
    for name in names:
        np.testing.assert_array_equal(found[name], plain_int8(stored, name))
    assert len(names) == 7


# ---- how they are read


@pytest.mark.parametrize(("case", "reader"), [("mxfp4", Mxfp4), ("nf4", FourBits), ("blocks", Scaled), ("awq", Awq)])
def test_a_few_rows_at_a_time_give_the_whole(
    case: str, reader: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a large weight needs little memory while it is read."""
    make, quantize, about, *_ = CASES.get(case, (small, nf4, {"quant_method": "bitsandbytes"}))
    if case == "awq":
        make, (quantize, about, *_) = small, INTEGERS["awq"]
    write(tmp_path, make(), quantize, about, "experts." if case == "mxfp4" else "_proj.weight")
    expected, _ = load(tmp_path, make())
    monkeypatch.setattr(packed_module, "PIECE", 64 * 7)  # seven rows of 64 inputs
    whole_rows, pieces = reader.rows, []

    def rows(self: Any, parts: Any, start: int, stop: int) -> torch.Tensor:
        pieces.append(stop - start)
        values: torch.Tensor = whole_rows(self, parts, start, stop)
        return values

    monkeypatch.setattr(reader, "rows", rows)
    found, _ = load(tmp_path, make())
    assert max(pieces) == (1 if reader is Mxfp4 else 7)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.mark.parametrize("format", KEPT)
def test_the_quantized_base_keeps_codes_of_its_own_format(format: Any, tmp_path: Path) -> None:
    """Without another rounding: the weight of the quantized base is the one in the checkpoint."""
    quantize, about = KEPT[format]
    config = small(intermediate_size=128)  # blocks of 64 that do not cross rows
    write(tmp_path, config, quantize, about)
    model = CausalLM(load_config(tmp_path), dtype="bfloat16", quantize=format)
    notes: list[Any] = []
    base = load_weights(tmp_path, model.module, model.layout, whole(model.layout), notes.append)
    exact, _ = load(tmp_path, config, "float32")
    flat = unstack(base, model.layout)
    for name in (name for name in exact if name.endswith("_proj.weight")):
        parts = {key.removeprefix(f"{name}_"): array for key, array in flat.items() if key.startswith(f"{name}_")}
        ours = np.asarray(jax.jit(dequantize, static_argnums=1)(parts, exact[name].shape[1]))
        if format == "nf4":  # exact is rounded to the type that bitsandbytes returns
            ours = torch.tensor(ours).bfloat16().float().numpy()
            assert (ours != exact[name]).mean() < 1e-3  # the tables of scales differ in the last bit of float32
        np.testing.assert_allclose(ours, exact[name], rtol=2.0**-7 if format == "nf4" else 3e-7, atol=0)
    said = [note.text for note in notes if isinstance(note, Note)]
    label = "float8" if format == "fp8" else format
    assert said == [f"The base is stored in {label}: the codes of 7 weights are used as they are"]


def test_another_format_is_quantized_again_and_that_is_said(tmp_path: Path) -> None:
    write(tmp_path, small(), float8(32, 32), FP8)
    model = CausalLM(load_config(tmp_path), dtype="bfloat16", quantize="int8")
    notes: list[Any] = []
    load_weights(tmp_path, model.module, model.layout, whole(model.layout), notes.append)
    said = [note.text for note in notes if isinstance(note, Note)]
    assert said == ["The base is stored in float8: dequantized to bfloat16 while loading and quantized again to int8"]


def test_the_step_does_not_see_how_a_checkpoint_is_stored(tmp_path: Path) -> None:
    """Memory and time of preflight come from this layout."""
    write(tmp_path, gpt_oss(), mxfp4, {"quant_method": "mxfp4"}, "experts.")
    ours, plain = (CausalLM(config, dtype="bfloat16") for config in (load_config(tmp_path), gpt_oss()))
    assert ours.layout == plain.layout and read_method(tmp_path) is not None


# ---- refusals

UNKNOWN: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "aqlm"}, "quantized with aqlm"),
    "no method": ({"weights": "smaller"}, "an unknown method"),
    "bits": ({**GPTQ, "bits": 3}, "GPTQ with 3 bits"),
    "layout": ({**GPTQ, "checkpoint_format": "marlin"}, "layout marlin"),
    "awq gemv": ({"quant_method": "awq", "version": "gemv"}, "AWQ with 4 bits in the layout gemv"),
    "format": ({**COMPRESSED, "format": "marlin-24"}, "the format marlin-24"),
    "sparse": ({**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    "rotated": ({**COMPRESSED, "transform_config": {"config_groups": {}, "a": 1}}, "transformed"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_checkpoint_quantized_in_an_unknown_way_is_refused(name: str, tmp_path: Path) -> None:
    about, what = UNKNOWN[name]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": about}))
    with pytest.raises(TrilloraError) as caught:
        find_model(str(tmp_path), with_weights=False)
    assert what in caught.value.what and str(tmp_path / "config.json") in str(caught.value.where)
    assert "unquantized" in caught.value.do


def test_a_checkpoint_of_modelopt_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "hf_quant_config.json").write_text("{}")
    with pytest.raises(TrilloraError, match="ModelOpt"):
        find_model(str(tmp_path), with_weights=False)


def damage(folder: Path, change: Callable[[Tensors], None]) -> TrilloraError:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(TrilloraError) as caught:
        load(folder, small())
    return caught.value


NAME = "model.layers.0.mlp.up_proj.weight"
DAMAGES: dict[str, tuple[Quantize, dict[str, Any], Callable[[Tensors], Any], str]] = {
    "no scale": (float8(32, 32), FP8, lambda t: t.pop(f"{NAME}_scale_inv"), "stored as F8_E4M3"),
    "wrong grid": (float8(32, 32), FP8, lambda t: t.update({f"{NAME}_scale_inv": torch.ones(5, 7)}), "do not fit"),
    **{
        f"scale {value:g}": (
            float8(32, 32),
            FP8,
            lambda t, value=value: t[f"{NAME}_scale_inv"].__setitem__((0, 1), value),
            f"A scale of the quantized {NAME} is {value:.3g}",
        )
        for value in (-1e38, -1.0, 1e38, math.inf, math.nan)
    },
    "negative global scale": (
        fp4("nvfp4"),
        INTEGERS["nvfp4"][1],
        lambda t: t.update({f"{NAME}_global_scale": -t[f"{NAME}_global_scale"]}),
        "A scale of the quantized",
    ),
    "no global scale": (
        fp4("nvfp4"),
        INTEGERS["nvfp4"][1],
        lambda t: t.pop(f"{NAME}_global_scale"),
        "do not fit",
    ),
    "few codes": (nf4, KEPT["nf4"][1], lambda t: t.update({NAME: t[NAME][:10].clone()}), "do not fit"),
    "no table": (nf4, KEPT["nf4"][1], lambda t: t.pop(f"{NAME}.quant_map"), "do not fit"),
    "old layout": (
        int8,
        KEPT["int8"][1],
        lambda t: t.update({f"{NAME.removesuffix('weight')}weight_format": torch.tensor(2, dtype=torch.uint8)}),
        "tensor cores",
    ),
    "scaled activations": (
        awq,
        INTEGERS["awq"][1],
        lambda t: t.update({"model.act.scales": torch.ones(3)}),
        "scales act",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_parts_that_do_not_fit_are_refused(name: str, tmp_path: Path) -> None:
    quantize, about, change, what = DAMAGES[name]
    write(tmp_path, small(), quantize, about)
    error = damage(tmp_path, change)
    assert what in error.what and "model.safetensors" in str(error.where) and error.do


def test_any_change_of_a_quantized_file_is_refused_or_read(tmp_path: Path) -> None:
    """Of its header, and of bitsandbytes' descriptions of weights. No other exception, and no more memory."""
    write(tmp_path, small(), nf4, KEPT["nf4"][1])
    module, file = meta_model(small()), tmp_path / "model.safetensors"
    layout, data = layout_of(module), file.read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    state = data.index(b'{"quant_type"', size)
    pieces = (slice(0, size), slice(state, state + 100))
    outcomes = {"read": 0, "refused": 0}
    for seed in range(dose(60, 3000)):
        piece = pieces[seed % 2]
        old = data[piece]
        new = changed_bytes(old, random.Random(seed)).ljust(len(old))[: len(old)]
        file.write_bytes(data[: piece.start] + new + data[piece.stop :])
        try:
            for source in resolve_sources(tmp_path, module, layout).values():
                if isinstance(source, Stored) and source.packed is not None:
                    with opened_tensor(source, torch.bfloat16) as read:
                        assert read(()).shape == source.shape
            outcomes["read"] += 1
        except TrilloraError as error:
            assert error.where and error.do, seed
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0, outcomes


def test_quantized_transposed_layers_are_refused(tmp_path: Path) -> None:
    """bitsandbytes stores a Conv1D transposed; a square one would load without an error and be wrong."""
    config = GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=96, n_positions=32)
    write(tmp_path, config, lambda name, weight: int8(name, weight.T), KEPT["int8"][1], "attn.c_proj.weight")
    with pytest.raises(TrilloraError, match="transposed linear layers"):
        load(tmp_path, config)
