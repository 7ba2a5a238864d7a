"""A quantized base: its numbers, its products, and runs on it.

References: bitsandbytes' own codes for nf4 (`golden/nf4-bitsandbytes.json`), the rounding bounds of each format, and
PyTorch with the dequantized weights in place of the original ones.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import tiny_run
import torch
from architecture_checks import (
    GRADIENTS,
    LOGITS,
    LORA,
    Subject,
    distance,
    gradient_distance,
    logits_and_gradients,
    to_jax,
)
from dose import FULL, full_dose_only, slow_case
from quantized_trees import dequantized, matrix, quantized, tree_of, with_dequantized_weights
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.pytorch_utils import Conv1D
from typer.testing import CliRunner

from trillora.cli import app
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.devices.slices import find_slice
from trillora.engine.quantize import BLOCK, DYNAMIC, NF4, Format, linear
from trillora.errors import TrilloraError
from trillora.evaluation.evaluate import evaluate
from trillora.events import Chosen, Note
from trillora.generation.generator import Generator
from trillora.model.bridge import CausalLM, ModelOptions
from trillora.model.layout import Tree, stack, stored_weights, unstack
from trillora.model.loading.source import load_config
from trillora.model.loading.weights import load_weights, random_weights
from trillora.model.lora_spec import LoraSpec
from trillora.preflight.compiler_process import StepSearch, by_estimate
from trillora.recipe.load import load_recipe, load_run_recipe
from trillora.recipe.schema import stages_of
from trillora.step import autotune
from trillora.step.shardings import weight_shardings
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]

NUM_LAYERS = 2 if FULL else 1  # of the model that is trained
FORMATS: tuple[Format, ...] = ("int8", "int4", "nf4", "fp8")
BITSANDBYTES = json.loads((Path(__file__).parents[1] / "golden" / "nf4-bitsandbytes.json").read_text())
product = jax.jit(linear)
ROUNDING = 1e-5  # of the largest value: float32, the same sum scaled before or after


def stored(name: str, dtype: Any) -> np.ndarray:
    return np.frombuffer(base64.b64decode(BITSANDBYTES[name]), dtype)


def codes_in_order(packed: np.ndarray, num_rows: int) -> np.ndarray:
    """Our nf4 codes, one per weight: the halves of each block are in the high and the low bits of its bytes."""
    blocks = packed.reshape(num_rows, -1, BLOCK // 2)
    return np.concatenate([blocks >> 4, blocks & 15], axis=-1).reshape(num_rows, -1)


# ---- numbers


def test_tables_equal_those_of_bitsandbytes() -> None:
    assert BITSANDBYTES["nf4"] == NF4.tolist()
    # torch and numpy round evenly spaced numbers differently in the last bit.
    np.testing.assert_array_max_ulp(DYNAMIC, stored("dynamic_float32", np.float32), maxulp=2)


def test_nf4_codes_and_scales_equal_those_of_bitsandbytes() -> None:
    weight = matrix(33, 512)  # 264 blocks: a whole group of scales and a part of one
    parts = quantized(weight, "nf4")
    theirs = stored("codes_uint8", np.uint8)
    assert (
        codes_in_order(np.asarray(parts["q"]), 33).ravel() == np.stack([theirs >> 4, theirs & 15], -1).ravel()
    ).all()
    assert (np.asarray(parts["absmax"]).ravel() == stored("absmax_uint8", np.uint8)).all()
    assert np.asarray(parts["absmax_scale"]).tolist() == pytest.approx(BITSANDBYTES["absmax_scale"], rel=1e-6)
    assert float(parts["absmax_mean"]) == pytest.approx(BITSANDBYTES["absmax_mean"], rel=1e-6)
    rows = np.asarray(dequantized(parts, 512))[:2]
    np.testing.assert_allclose(rows, stored("first_rows_float32", np.float32).reshape(2, 512), rtol=2e-6, atol=0)


@pytest.mark.parametrize("shape", [(33, 512), (5, 96), (3, 7)])
@pytest.mark.parametrize("format", FORMATS)
def test_error_is_within_the_rounding_of_the_format(format: Format, shape: tuple[int, int]) -> None:
    weight = matrix(33, 512)[: shape[0], : shape[1]]
    parts = quantized(jnp.asarray(weight), format)
    error = np.abs(np.asarray(dequantized(parts, shape[1])) - weight)
    largest = np.abs(weight).max(axis=1, keepdims=True)
    if format in ("int8", "int4"):  # half a step
        bound = largest / {"int8": 127, "int4": 7}[format] / 2
    elif format == "fp8":  # half a unit of three fraction bits; below 2**-6, of the smallest number
        bound = np.maximum(np.abs(weight) * 2**-4, largest / 448 * 2**-10)
    else:  # half of the largest gap, between -1 and -0.696; and the error of the scale: half of its largest gap
        padded = np.pad(weight, ((0, 0), (0, -shape[1] % BLOCK)))
        blocks = np.abs(padded.reshape(shape[0], -1, BLOCK)).max(-1)
        absmax = np.repeat(blocks, BLOCK, axis=1)[:, : shape[1]]
        scale_error = np.abs(blocks - blocks.mean()).max() * np.diff(DYNAMIC).max() / 2
        bound = absmax * np.diff(NF4).max() / 2 + scale_error
    assert (error <= bound * (1 + 1e-5) + 1e-9).all()
    assert error.max() > 0


def test_zeros_stay_zeros() -> None:
    for format in FORMATS:
        parts = quantized(jnp.zeros((4, 64)), format)
        assert not np.asarray(dequantized(parts, 64)).any() and not np.asarray(product(jnp.ones((2, 64)), parts)).any()


@pytest.mark.parametrize(("format", "bits"), [("int8", 8.006), ("fp8", 8.006), ("int4", 4.006), ("nf4", 4.127)])
def test_bits_per_weight_of_a_large_model(format: Format, bits: float) -> None:
    """One scale of 32 bits per channel of at least 4096 inputs; nf4 as in the QLoRA paper."""
    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=1, num_key_value_heads=8)
    layout = CausalLM(config, ModelOptions(quantize=format)).layout
    num_bytes = sum(leaf.num_bytes for leaf in layout.values() if leaf.quantized)
    weights = {leaf.quantized.key: leaf.quantized.weight for leaf in layout.values() if leaf.quantized}
    assert len(weights) == 7
    assert 8 * num_bytes / sum(np.prod(leaf.shape) for leaf in weights.values()) == pytest.approx(bits, abs=0.002)


# ---- products


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_product_and_its_gradient_equal_those_of_the_dequantized_weight(format: Format, with_bias: bool) -> None:
    weight = matrix(33, 512)[:, :96]
    parts = quantized(jnp.asarray(weight), format)
    random = np.random.default_rng(0)
    x, dy = (jnp.asarray(random.normal(size=(2, 5, n)), jnp.float32) for n in (96, 33))
    bias = jnp.asarray(random.normal(size=33), jnp.float32) if with_bias else None
    y, pull_back = jax.vjp(lambda x: linear(x, parts, bias), x)
    whole = np.asarray(dequantized(parts, 96), np.float64)
    expected = np.asarray(x, np.float64) @ whole.T + (0 if bias is None else np.asarray(bias, np.float64))
    assert distance(y, expected) < ROUNDING
    assert distance(pull_back(dy)[0], np.asarray(dy, np.float64) @ whole) < ROUNDING
    # Only the codes are kept for the backward pass, not the wider weight.
    kept = [leaf for leaf in jax.tree.leaves(pull_back) if leaf.size]
    assert len(kept) == len(parts) and sum(leaf.size for leaf in kept) == sum(part.size for part in parts.values())


def test_bfloat16_products_are_as_exact_as_those_of_a_bfloat16_weight() -> None:
    weight = matrix(33, 512)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 512)), jnp.bfloat16)
    for format in ("int8", "int4", "nf4"):
        parts = quantized(jnp.asarray(weight), format)
        whole = dequantized(parts, 512)
        exact = np.asarray(x, np.float64) @ np.asarray(whole, np.float64).T
        plain = x @ whole.astype(jnp.bfloat16).T
        ours = product(x, parts)
        assert ours.dtype == jnp.bfloat16

        def typical(y: jax.Array, exact: np.ndarray = exact) -> float:
            return float(np.sqrt(np.mean((np.asarray(y, np.float64) - exact) ** 2)))

        assert typical(ours) <= 1.1 * typical(plain), format


# ---- models


@pytest.mark.parametrize(
    ("name", "format", "options"),
    [
        ("llama", "nf4", {}),
        slow_case("llama", "int8", {"remat": "none"}),
        slow_case("llama", "int4", {"scan": False}),
        ("gpt2", "int8", {}),  # Conv1D with biases
        ("mamba", "int8", {}),  # reads the weight of a linear layer without calling it
        slow_case("llama", "fp8", {}),
        slow_case("llama", "int8", {"remat": "linear"}),
        slow_case("llama", "int8", {"remat": "dots"}),
        slow_case("gpt2", "nf4", {}),
        slow_case("mixtral", "int8", {}),  # fused experts and a router, which stay
        slow_case("zamba2", "int8", {}),  # shared weights, which stay
        slow_case("gemma2", "int4", {}),
        slow_case("deepseek_v3", "nf4", {}),
        slow_case("falcon_h1", "int8", {}),
        slow_case("lfm2", "int8", {}),
    ],
)
def test_logits_and_gradients_equal_pytorch_with_the_dequantized_weights(
    name: str, format: Format, options: dict[str, Any]
) -> None:
    subject = Subject(name)
    ours = subject.ours(quantize=format, **options)
    reference, flat = with_dequantized_weights(name, ours)
    expected, expected_gradients = subject._reference(reference)
    adapter = stack(subject.adapter, ours.adapter_layout)
    logits, gradients = logits_and_gradients(ours, tree_of(ours, flat), adapter, subject.tokens)
    assert distance(logits, expected) <= LOGITS
    assert gradient_distance(unstack(gradients, ours.adapter_layout), expected_gradients) <= GRADIENTS
    assert distance(logits, subject.logits) > 10 * LOGITS  # the weights did change


def test_only_linear_layers_of_the_decoder_are_quantized() -> None:
    model = CausalLM(tiny_models.configuration("mixtral"), ModelOptions(quantize="int8", scan=False))
    quantized = {leaf.quantized.key for leaf in model.layout.values() if leaf.quantized}
    layers = [f"model.layers.{i}.self_attn.{name}_proj.weight" for i in range(4) for name in "qkvo"]
    assert quantized == set(layers)
    untouched = {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.experts.gate_up_proj"}
    assert untouched <= model.layout.keys()


def test_a_batch_of_adapters_on_one_base_equals_each_alone() -> None:
    config = tiny_models.configuration("llama")
    config.num_hidden_layers = 1
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    model = CausalLM(config, ModelOptions(quantize="int8", mesh=mesh), lora=LORA)
    base = random_weights(model.module, model.layout, weight_shardings(model, mesh), seed=0)
    random = np.random.default_rng(0)
    tokens = {"tokens": jnp.asarray(random.integers(3, 256, (2, 12)), jnp.int32)}
    adapters = {
        key: jnp.asarray(random.normal(0, 0.2, (2, *leaf.shape)), jnp.float32)
        for key, leaf in model.adapter_layout.items()
    }

    def loss(adapter: Tree, base: Tree) -> jax.Array:
        return (model.hidden(base, adapter, tokens) ** 2).mean()

    gradient = jax.grad(loss)
    together, alone = jax.jit(jax.vmap(gradient, (0, None)))(adapters, base), jax.jit(gradient)
    for i in range(2):
        expected = jax.tree.map(np.asarray, alone({key: a[i] for key, a in adapters.items()}, base))
        assert gradient_distance({key: a[i] for key, a in together.items()}, expected) <= GRADIENTS


def test_frozen_weight_is_the_dequantized_one() -> None:
    """For adapters that need it, such as DoRA's norm."""
    for name, module_name in (("llama", "model.layers.0.self_attn.q_proj"), ("gpt2", "transformer.h.0.attn.c_attn")):
        model = CausalLM(tiny_models.configuration(name), ModelOptions(quantize="int8", scan=False, remat="none"))
        module = model.module.get_submodule(module_name)
        reference, flat = with_dequantized_weights(name, model)
        seen: list[np.ndarray] = []

        def look(module: Any, args: Any, out: Any, seen: list[np.ndarray] = seen) -> None:
            jax.debug.callback(seen.append, module.frozen_weight())

        module.register_forward_hook(look)
        jax.block_until_ready(jax.jit(model.logits)(tree_of(model, flat), {}, {"tokens": jnp.ones((1, 4), jnp.int32)}))
        jax.effects_barrier()
        expected = reference.get_submodule(module_name).weight.detach().numpy()
        expected = expected.T if isinstance(module, Conv1D) else expected
        assert any(np.array_equal(weight, expected) for weight in seen)  # equal layers share the layer that is traced


@pytest.mark.parametrize("name", [slow_case("llama"), "gpt2"])
def test_dora_starts_from_the_norms_of_the_dequantized_weights(name: str) -> None:
    model = CausalLM(tiny_models.configuration(name), ModelOptions(quantize="nf4"), lora=LoraSpec(rank=2, dora=True))
    reference, flat = with_dequantized_weights(name, model)
    started = unstack(model.initial_adapter(tree_of(model, flat), seed=0), model.adapter_layout)
    magnitudes = {key: value for key, value in started.items() if key.endswith(".lora_magnitude")}
    assert len(magnitudes) == len(model.targets)
    for key, norms in magnitudes.items():
        module = reference.get_submodule(key.removesuffix(".lora_magnitude"))
        weight = module.weight.detach().numpy()
        np.testing.assert_allclose(
            norms, np.linalg.norm(weight, axis=0 if isinstance(module, Conv1D) else 1), rtol=1e-5
        )


def test_unknown_format_is_refused() -> None:
    with pytest.raises(TrilloraError, match="int8") as error:
        load_recipe({"model": {"name": "smollm2", "quantize": "int3"}, "data": "chats.jsonl"})
    assert "model.quantize" in str(error.value.where)


def test_a_model_without_linear_layers_is_refused() -> None:
    config = tiny_models.configuration("llama")
    config.num_hidden_layers = 0
    with pytest.raises(TrilloraError, match="no linear layers") as error:
        CausalLM(config, ModelOptions(quantize="int8"))
    assert error.value.where == "model.quantize"


# ---- loading and runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers at full dose, which are scanned. The small dose scans in the tests of gradients and loading only."""
    config = tiny_run.wide_llama(num_layers=NUM_LAYERS)
    return tiny_run.write_both(tmp_path_factory.mktemp("quantized"), config)


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_model(tmp_path_factory.mktemp("stacked") / "model", tiny_run.wide_llama()).parent


@pytest.mark.parametrize("format", ["nf4", *map(slow_case, ("int8", "int4", "fp8"))])
def test_loading_keeps_the_codes_and_at_most_one_whole_weight(stacked: Path, format: Format) -> None:
    """On a mesh that splits inputs and outputs; the codes equal the whole matrix's."""
    from safetensors.torch import load_file

    mesh = make_mesh(jax.devices(), MeshShape(fsdp=2, tensor=4))
    model = CausalLM(load_config(stacked / "model"), ModelOptions(quantize=format, mesh=mesh))
    shardings = weight_shardings(model, mesh)
    before = {id(a) for a in jax.live_arrays()}
    most = 0

    def measure(event: Any) -> None:
        nonlocal most
        most = max(most, sum(a.nbytes for a in jax.live_arrays() if id(a) not in before))

    base = load_weights(stacked / "model", model.module, model.layout, shardings, measure)
    assert {k: (a.shape, a.dtype) for k, a in base.items()} == {k: (a.shape, a.dtype) for k, a in model.layout.items()}
    largest = max(leaf.num_bytes // len(leaf.names) for leaf, _ in stored_weights(model.layout).values())
    assert most <= sum(a.nbytes for a in base.values()) + largest
    files = load_file(stacked / "model" / "model.safetensors")
    num_checked = 0
    for leaf, parts in stored_weights(model.layout).values():
        # On the CPU: slices of arrays on many devices would be compiled.
        all_layers = {leaf.quantized.name: np.asarray(base[key]) for key, leaf in parts.items() if leaf.quantized}
        for layer, name in enumerate(leaf.names if all_layers else ()):
            arrays = {part: array[layer] for part, array in all_layers.items()}
            expected = quantized(to_jax(files[name]), format)
            for part, array in arrays.items():
                ours, whole = np.asarray(array, np.float32), np.asarray(expected[part], np.float32)
                if part == "absmax":  # around their mean, whose sum over devices is rounded differently
                    assert (ours != whole).mean() < 2e-3 and np.abs(ours - whole).max() <= 1
                else:
                    np.testing.assert_allclose(ours, whole, rtol=1e-6)
            num_checked += 1
    assert num_checked == 2 * 7
    down = next(k for k in base if "down_proj" in k and k.endswith("_q"))
    assert base[down].sharding.spec[-1] == "tensor" and base[down].sharding.spec[-2] == "fsdp"


def test_blocks_are_not_split_over_devices() -> None:
    """With 96 inputs, two devices would share a block of 64: the inputs stay together."""
    config = tiny_run.wide_llama()
    config.intermediate_size = 1024 + BLOCK // 2 * 3
    mesh = make_mesh(jax.devices()[:4], MeshShape(tensor=4))
    for format, expected in (("nf4", None), ("int8", "tensor")):
        model = CausalLM(config, ModelOptions(quantize=format, mesh=mesh))
        down = next(k for k in model.layout if "down_proj" in k and k.endswith("_q"))
        spec = (*weight_shardings(model, mesh)[down].spec, None, None, None)
        assert spec[2] == expected


def test_random_weights_are_quantized_too(stacked: Path) -> None:
    mesh = make_mesh(jax.devices()[:1], MeshShape())
    model = CausalLM(load_config(stacked / "model"), ModelOptions(quantize="int8", mesh=mesh))
    base = random_weights(model.module, model.layout, weight_shardings(model, mesh), seed=0)
    assert {k: (a.shape, a.dtype) for k, a in base.items()} == {k: (a.shape, a.dtype) for k, a in model.layout.items()}
    codes = np.asarray(next(a for k, a in base.items() if k.endswith("q_proj.weight_q")))
    assert (np.abs(codes).max(axis=-1) == 127).all() and len({layer.tobytes() for layer in codes}) == len(codes)


def recipe(folder: Path, quantize: str, **sections: Any) -> Any:
    sections = {"model": {"name": str(folder / "model"), "quantize": quantize}, **sections}
    return load_recipe(tiny_run.recipe(folder, **sections))


@pytest.fixture(scope="module")
def runs(folder: Path) -> Callable[[str], Path]:
    """A finished run on one device, for each format that a test asks for."""

    def run(quantize: str) -> Path:
        out = folder / f"run-{quantize}"
        if not out.exists():
            train(recipe(folder, quantize, train={"checkpoint_every": 2, "keep_checkpoints": 10}), out)
        return out

    return run


@pytest.mark.parametrize("format", ["int8", slow_case("nf4"), slow_case("int4"), slow_case("fp8")])
def test_a_run_on_a_quantized_base_learns_like_one_on_the_whole(runs: Callable[[str], Path], format: Format) -> None:
    losses, whole = (tiny_run.losses(runs(name)) for name in (format, "none"))
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(whole, rel=0.02) and losses != whole
    assert load_run_recipe(runs(format)).recipe.model.quantize == format


@pytest.mark.parametrize(
    ("format", "mesh"),
    [
        ("int8", {"data": 2, "fsdp": 2, "tensor": 2}),
        slow_case("nf4", {"tensor": 4}),
        slow_case("int4", {"fsdp": 8}),
        slow_case("nf4", {"data": 2, "fsdp": 2, "tensor": 2}),
    ],
)
def test_many_devices_equal_one(
    folder: Path, runs: Callable[[str], Path], tmp_path: Path, format: Format, mesh: dict[str, int]
) -> None:
    hardware = {"devices": int(np.prod(list(mesh.values()))), "mesh": mesh}
    result = train(recipe(folder, format, hardware=hardware), tmp_path / "run")
    assert list(result.losses) == pytest.approx(tiny_run.losses(runs(format)), rel=1e-5)  # sums in another order


def test_a_resumed_run_ends_bit_identical_and_keeps_its_format(
    folder: Path, runs: Callable[[str], Path], tmp_path: Path
) -> None:
    whole, run = runs("int8"), tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "adapter")
    tiny_run.checkpoints_of(run).remove_after(2)
    (run / "saved.json").unlink()
    saving = {"checkpoint_every": 2, "keep_checkpoints": 10}
    with pytest.raises(TrilloraError, match=r"model\.quantize was \"int8\" and is \"nf4\""):
        train(recipe(folder, "nf4", train=saving), run)
    train(recipe(folder, "int8", train=saving), run)
    tiny_run.assert_same(run, whole)


def test_generation_uses_the_format_of_the_run(runs: Callable[[str], Path]) -> None:
    run = str(runs("int8"))
    generator = Generator.open(run)
    assert generator.model.quantize == "int8"
    assert Generator.open(run, overrides=["model.quantize=none"]).model.quantize is None
    reference = torch_model(generator, runs("int8").parent / "model")
    prompt = generator.prompts.encode("What is 3 plus 4?")
    written = generator.continue_tokens([prompt], max_tokens=6, adapted=False)[0][0]
    out = reference.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert written == out[0, len(prompt) :].tolist()[: len(written)] and written


def test_generation_can_quantize_a_base_that_was_trained_whole(runs: Callable[[str], Path]) -> None:
    events: list[Any] = []
    generator = Generator.open(str(runs("none")), quantize="int8", listener=events.append)
    same = Generator.open(str(runs("int8"))).base
    assert generator.base.keys() == same.keys() and any(key.endswith("_q") for key in same)
    assert all(np.array_equal(generator.base[key], same[key]) for key in same)
    said = [event.text for event in events if isinstance(event, Note)]
    assert "The base is quantized to int8. In training it was not quantized, so answers may differ." in said
    events.clear()
    assert Generator.open(str(runs("int8")), quantize="none", listener=events.append).model.quantize is None
    said = [event.text for event in events if isinstance(event, Note)]
    assert "The base is not quantized. In training it was in int8, so answers may differ." in said


def test_the_command_quantizes_and_refuses_unknown_formats(runs: Callable[[str], Path]) -> None:
    command = ["generate", str(runs("none")), "-p", "What is 3 plus 4?", "--max-tokens", "2", "--quantize"]
    assert CliRunner().invoke(app, [*command, "nf4"]).exit_code == 0
    refused = CliRunner().invoke(app, [*command, "int3"])
    assert refused.exit_code == 2 and "'int3' is none of" in refused.output


def torch_model(generator: Generator, folder: Path) -> Any:
    """transformers' model with the generator's weights, dequantized."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    num_replaced = 0
    for leaf, parts in stored_weights(generator.model.layout).values():
        arrays = {leaf.quantized.name: generator.base[key] for key, leaf in parts.items() if leaf.quantized}
        if arrays:
            parameter = model.get_parameter(leaf.names[0])
            parameter.data = torch.tensor(np.asarray(dequantized(arrays, leaf.shape[-1])))
            num_replaced += 1
    assert num_replaced == NUM_LAYERS * 7
    return model


@full_dose_only
def test_evaluation_uses_the_format_of_the_run(runs: Callable[[str], Path], folder: Path) -> None:
    def loss(*overrides: str) -> float:
        found = evaluate(
            runs("int8"), folder / "chats.jsonl", overrides=overrides, max_rows=4, max_tokens=1, with_base=False
        )
        assert found.adapter.loss is not None
        return found.adapter.loss

    quantized, whole = loss(), loss("model.quantize=none")
    assert quantized != whole and quantized == pytest.approx(whole, rel=0.02)


# ---- auto, and preflight


@pytest.mark.parametrize(("expected", "room"), [("none", 10), ("none", 1.3), ("int8", 1.3), ("nf4", 1.3)])
def test_auto_takes_the_first_format_that_fits(
    folder: Path, expected: Any, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The devices have `room` times the memory of the base in the expected format; training takes 1.25 times."""
    config = load_config(folder / "model")
    layout = CausalLM(config, ModelOptions(quantize=None if expected == "none" else expected)).layout
    limit = room * sum(leaf.num_bytes for leaf in layout.values())
    compiled: list[str] = []

    def compiler(assembly: Any) -> tuple[Any, float]:
        compiled.append(str(assembly.model.quantize))
        return object(), 1.25 * autotune.local_bytes(assembly.base_shapes) - assembly.state_bytes

    monkeypatch.setattr(autotune, "memory_limit", lambda devices: limit)
    chosen: list[Any] = []
    stage = stages_of(recipe(folder, "auto"))[0].recipe
    plan = autotune.choose(stage, config, jax.devices()[:1], 4, chosen.append, compiler=compiler)
    assert plan.settings.quantize == expected
    (event,) = [event for event in chosen if isinstance(event, Chosen) and event.path == "model.quantize"]
    assert event.value == expected and "GiB" in event.reason
    order = ["none", "int8", "nf4"]
    assert [attempt.fits for attempt in plan.tried] == [False] * order.index(expected) + [True]
    assert compiled[-1] == (expected if expected != "none" else "None")


def estimated(quantize: str, batch_size: int = 1) -> Any:
    """A LoRA of rank 16 on a 7B model with sequences of 4,096 tokens on one v5e chip."""
    stage = load_recipe(
        {
            "model": {"name": "mistralai/Mistral-7B-v0.3", "dtype": "bfloat16", "quantize": quantize},
            "data": "chats.jsonl",
            "train": {"sequence_length": 4096, "batch_size": batch_size, "steps": 10},
            "engine": {"remat": "auto" if FULL else "full"},
        }
    )
    config = MistralConfig(sliding_window=None, vocab_size=32768)
    recipe = stages_of(stage)[0].recipe
    return by_estimate(StepSearch(recipe, config, find_slice("v5e-1"), 10))


@pytest.mark.parametrize(
    ("quantize", "base_gib"), [("int8", 7.0), slow_case("int4", 3.8), slow_case("nf4", 3.9), slow_case("auto", 7.0)]
)
def test_a_7b_model_fits_one_v5e_chip_when_it_is_quantized(quantize: str, base_gib: float) -> None:
    found = estimated(quantize)
    assert found.fits and found.hbm_peak_gib < 0.97 * found.hbm_limit_gib
    assert found.memory["base"] == pytest.approx(base_gib, abs=0.1)
    assert found.settings.quantize == ("int8" if quantize == "auto" else quantize)
    # Disk, download and RAM depend on the files, which are not quantized.
    assert found.weights_bytes > 14e9 and found.largest_tensor_bytes == 2 * 32768 * 4096


def test_a_7b_model_in_bfloat16_does_not_fit_one_v5e_chip() -> None:
    found = estimated("none")
    assert not found.fits
