"""Products with the frozen base in int8 or fp8 (`engine.matmul`).

References: products in float64 with the error that rounding must give, a PyTorch model whose linear layers round in the
same way, and runs in full precision.
"""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
import torch
from architecture_checks import GRADIENTS, LOGITS, Subject, distance, gradient_distance, logits_and_gradients
from dose import full_dose_only, slow_case
from jax.sharding import NamedSharding, PartitionSpec
from quantized_trees import matrix, tree_of, with_dequantized_weights
from transformers import LlamaConfig

import trillora
from trillora.certify.adapter_checks import check_arithmetic
from trillora.devices.chips import CHIPS, GPUS
from trillora.devices.mesh import MeshShape, make_mesh
from trillora.devices.slices import find_slice
from trillora.engine.quantize import Format, Parts, dequantize, quantize, round_rows, rounded_linear, to_fp8
from trillora.errors import TrilloraError
from trillora.generation.generator import Generator
from trillora.model.bridge import CausalLM
from trillora.model.layout import stack, unstack
from trillora.model.lora_spec import LoraSpec
from trillora.preflight.compiler_process import StepSearch, by_estimate
from trillora.preflight.hlo.parse import parse
from trillora.preflight.hlo.simulate import TPU_8_BITS, simulate
from trillora.preflight.hlo.work import Work
from trillora.recipe.load import load_recipe, load_run_recipe
from trillora.recipe.resolve import StepSettings, given_settings
from trillora.recipe.schema import MeshSection, stages_of
from trillora.step.build import assemble
from trillora.step.decisions import check_products
from trillora.training.run_identity import differences, fixed_options, with_defaults
from trillora.training.trainer import train

pytestmark = [pytest.mark.core, pytest.mark.usefixtures("shared_steps")]

FORMATS = ("int8", "fp8")
STORED: dict[str, Format] = {"int8": "int8", "fp8": "fp8_one_scale"}
DATA = Path(trillora.__file__).parent / "quickstart" / "data"
FLOAT32 = 1e-5  # of the largest value: sums in another order


def rounding_bound(x: np.ndarray, format: str) -> np.ndarray:
    """How far a number can be from its code. int8: half a step of the row's scale. fp8: half a unit of three fraction
    bits; below 2**-6 times the scale, half of the smallest number, with a scale of at most 1/128 of the largest."""
    if format == "int8":
        return np.broadcast_to(np.abs(x).max(axis=-1, keepdims=True) / 127 / 2, x.shape)
    return np.maximum(np.abs(x) * 2**-4, np.abs(x).max() / 128 * 2**-10)


@pytest.fixture(scope="module", params=FORMATS)
def product(request: pytest.FixtureRequest) -> SimpleNamespace:
    """A product and its gradient, in float32."""
    weight = matrix(33, 512)
    parts = quantize(jnp.asarray(weight), STORED[request.param])
    random = np.random.default_rng(0)
    x, dy = (random.normal(size=(4, 16, n)).astype(np.float32) for n in (512, 33))
    x[0, 0, :4] *= 50  # a row with outliers must not spoil the others
    y, pull_back = jax.vjp(lambda x: rounded_linear(x, parts), jnp.asarray(x))
    return SimpleNamespace(
        format=request.param, parts=parts, weight=weight, x=x, dy=dy, y=y, pull_back=pull_back, dx=pull_back(dy)[0]
    )


def whole(parts: Parts) -> np.ndarray:
    return np.asarray(dequantize(parts, parts["q"].shape[1]), np.float64)


# ---- products


def test_the_error_of_a_product_is_within_that_of_rounding_its_input(product: SimpleNamespace) -> None:
    weight = whole(product.parts)
    exact = product.x.astype(np.float64) @ weight.T
    bound = rounding_bound(product.x, product.format) @ np.abs(weight).T
    error = np.abs(np.asarray(product.y, np.float64) - exact)
    assert (error <= bound + FLOAT32 * np.abs(exact).max()).all()
    if product.format == "int8":  # errors are uniform within a step, and independent: the sum is as large as expected
        step = np.abs(product.x).max(-1, keepdims=True) / 127
        expected = step / np.sqrt(12) * np.linalg.norm(weight, axis=1)
        assert np.sqrt(np.mean((error / expected) ** 2)) == pytest.approx(1, abs=0.15)


def test_the_error_of_its_gradient_is_within_that_of_rounding_the_output_gradient(product: SimpleNamespace) -> None:
    codes, scale = (np.asarray(product.parts[name], np.float64) for name in ("q", "scale"))
    scaled = product.dy * scale
    error = np.abs(np.asarray(product.dx, np.float64) - scaled @ codes)
    if product.format == "int8":
        each = rounding_bound(scaled, "int8")
    else:  # e5m2: half a unit of two fraction bits; below 2**-14 times the scale, half of the smallest number
        each = np.maximum(np.abs(scaled) * 2**-3, np.abs(scaled).max() * 2**-14 * 2**-17)
    bound = each @ np.abs(codes)
    assert (error <= bound + FLOAT32 * np.abs(scaled @ codes).max()).all()
    assert error.max() > 0.01 * bound.max()  # it was rounded


def test_a_product_with_the_original_weight_adds_the_rounding_of_the_weight(product: SimpleNamespace) -> None:
    exact = product.x.astype(np.float64) @ product.weight.T.astype(np.float64)
    of_x = rounding_bound(product.x, product.format) @ np.abs(whole(product.parts)).T
    of_weight = np.abs(product.x) @ rounding_bound(product.weight, product.format).T
    assert (np.abs(product.y - exact) <= of_x + of_weight + FLOAT32 * np.abs(exact).max()).all()


def test_products_have_operands_of_eight_bits_forward_and_backward(product: SimpleNamespace) -> None:
    def both(x: jax.Array, dy: jax.Array) -> Any:
        y, pull_back = jax.vjp(lambda x: rounded_linear(x, product.parts), x)
        return y, pull_back(dy)

    arguments = [jnp.zeros(a.shape, jnp.bfloat16) for a in (product.x, product.dy)]
    lowered = jax.jit(both).lower(*arguments).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) == 2
    if product.format == "int8":
        assert all(line.count("xi8>") == 2 and line.endswith("xi32>") for line in products)
    else:  # what XLA rewrites to cuBLAS's fp8 product: matrices of codes, and a scalar times the result
        forward, backward = products
        assert forward.endswith("(tensor<64x512xf8E4M3FN>, tensor<33x512xf8E4M3FN>) -> tensor<64x33xbf16>")
        assert backward.endswith("(tensor<64x33xf8E5M2>, tensor<33x512xf8E4M3FN>) -> tensor<64x512xbf16>")
        assert [re.findall(r"contracting_dims = \[1\] x \[(\d)\]", line) for line in products] == [["1"], ["0"]]
        for line in products:
            result = line.split()[0]
            uses = [other for other in lowered.splitlines() if re.search(rf" {result}\b", other.partition("=")[2])]
            assert len(uses) == 1 and "stablehlo.multiply" in uses[0]
            scale = re.findall(r"%\w+", uses[0].partition("=")[2])[1]
            assert re.search(rf"{scale} = stablehlo.broadcast_in_dim %\w+, dims = \[\] : \(tensor<bf16>\)", lowered)


def test_only_the_codes_are_kept_for_the_backward_pass(product: SimpleNamespace) -> None:
    kept = jax.tree.leaves(product.pull_back)
    assert sorted(leaf.shape for leaf in kept) == sorted(part.shape for part in product.parts.values())


def test_bfloat16_in_bfloat16_out(product: SimpleNamespace) -> None:
    x, bias = jnp.asarray(product.x, jnp.bfloat16), jnp.arange(33, dtype=jnp.bfloat16)
    y = rounded_linear(x, product.parts, bias)
    assert y.dtype == jnp.bfloat16
    codes, scale = round_rows(x, "int8") if product.format == "int8" else to_fp8(x)
    rounded = np.asarray(codes, np.float64) * np.asarray(scale)[..., None]
    exact = rounded @ whole(product.parts).T + np.arange(33)
    assert (np.abs(np.asarray(y, np.float64) - exact) <= 2**-8 * np.abs(exact) + 1e-5).all()  # half a unit of 8 bits


def test_fp8_codes_do_not_depend_on_the_other_numbers() -> None:
    """The scale is a power of two, so that batches and devices do not change how a number is rounded."""
    x = np.random.default_rng(0).normal(size=(64, 32)).astype(np.float32)
    for others in (1.0, 3.7, 100.0):
        codes, scale = to_fp8(jnp.asarray(np.concatenate([x, np.full((1, 32), others * np.abs(x).max())])))
        assert np.log2(float(scale)) % 1 == 0 and 128 <= np.abs(np.asarray(codes, np.float32)).max() <= 256
        rounded = np.asarray(codes, np.float32)[:-1] * float(scale)
        is_normal = np.abs(x) >= 2**-6 * float(scale)
        alone = np.asarray(jnp.asarray(x).astype(jnp.float8_e4m3fn), np.float32)
        assert is_normal.mean() > 0.9 and (np.abs(x) >= 2**-6).mean() > 0.9
        both = is_normal & (np.abs(x) >= 2**-6)
        assert (rounded[both] == alone[both]).all()


def test_numbers_that_are_not_finite_reach_the_result(product: SimpleNamespace) -> None:
    """The step counts such losses and skips the update; integers must not hide them."""
    x = product.x.copy()
    x[0, 1, 3], x[2, 0, 0] = np.nan, np.inf
    finite = np.isfinite(np.asarray(rounded_linear(jnp.asarray(x), product.parts)))
    assert not finite[0, 1].any() and not finite[2, 0].any()
    assert finite.sum() == (
        finite.size - 2 * 33 if product.format == "int8" else 0
    )  # one scale for each row, or for all


def test_mapped_and_scanned_products_equal_single_ones(product: SimpleNamespace) -> None:
    mapped = jax.vmap(rounded_linear, (0, None, None))(product.x, product.parts, None)
    _, scanned = jax.lax.scan(lambda carry, x: (carry, rounded_linear(x, product.parts)), 0, jnp.asarray(product.x))
    single = np.stack([rounded_linear(jnp.asarray(x), product.parts) for x in product.x])
    for found in (mapped, scanned):
        np.testing.assert_allclose(found, single, rtol=0, atol=FLOAT32 * float(np.abs(single).max()))


def test_products_on_eight_devices_equal_those_on_one(product: SimpleNamespace) -> None:
    """Sequences, inputs and outputs are split. Sums of integers do not depend on their order."""
    mesh = make_mesh(jax.devices(), MeshShape(data=2, fsdp=2, tensor=2))

    def put(array: Any, *axes: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    x, codes = put(product.x, ("data", "fsdp"), None, "tensor"), put(product.parts["q"][:32], "fsdp", "tensor")
    scale = product.parts["scale"]
    y = jax.jit(rounded_linear)(x, {"q": codes, "scale": put(scale[:32] if scale.ndim else scale)})
    tolerance = 1e-6 if product.format == "int8" else FLOAT32  # the scales are multiplied in float32
    np.testing.assert_allclose(y, product.y[..., :32], rtol=tolerance, atol=tolerance * float(np.abs(y).max()))


# ---- models


class _Rounded(torch.autograd.Function):
    """x @ w.T in int8, written with PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        return _int8_rows(x) @ (codes * scale[:, None]).T

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        codes, scale = ctx.saved_tensors
        return _int8_rows(dy * scale) @ codes, None, None


def _int8_rows(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.round(x / step) * step


@pytest.mark.parametrize(
    ("name", "options"), [("llama", {}), slow_case("gpt2", {}), slow_case("llama", {"scan": False})]
)
def test_logits_and_adapter_gradients_are_those_of_rounded_products(
    name: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of PyTorch's model with rounded products. A number next to the middle between two codes may get another code
    there, so they are not equal; but most of the difference from full products is explained."""
    subject = Subject(name)
    ours = subject.ours(quantize="int8", matmul="int8", **options)
    reference, flat = with_dequantized_weights(name, ours)
    full, full_gradients = subject._reference(reference)
    adapter = stack({n: jnp.asarray(a) for n, a in subject.adapter.items()}, ours.adapter_layout)
    logits, gradients = logits_and_gradients(ours, tree_of(ours, flat), adapter, subject.tokens)
    found = unstack(gradients, ours.adapter_layout)
    assert distance(logits, full) > 10 * LOGITS and gradient_distance(found, full_gradients) > 10 * GRADIENTS
    rounded, _ = with_dequantized_weights(name, ours)
    for layer, module in rounded.named_modules():
        if f"{layer}.weight_q" in flat:
            codes, scale = (
                torch.tensor(np.asarray(flat[f"{layer}.weight_{part}"], np.float32)) for part in ("q", "scale")
            )
            bias = module.bias

            def forward(x: torch.Tensor, codes: Any = codes, scale: Any = scale, bias: Any = bias) -> torch.Tensor:
                y = _Rounded.apply(x, codes, scale)
                return y if bias is None else y + bias

            monkeypatch.setattr(module, "forward", forward)
    expected, expected_gradients = subject._reference(rounded)
    assert distance(logits, expected) < 0.2 * distance(logits, full)
    assert gradient_distance(found, expected_gradients) < 0.2 * gradient_distance(found, full_gradients)


def test_only_linear_layers_of_the_base_round() -> None:
    """The adapter's products, the embedding and the head keep their type."""
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, vocab_size=128
    )
    model = CausalLM(config, quantize="int8", matmul="int8", lora=LoraSpec(rank=4), remat="none")
    shapes = {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in model.layout.items()}
    adapter = {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in model.adapter_layout.items()}
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    lowered = jax.jit(lambda b, a, t: model.logits(b, a, {"tokens": t})).lower(shapes, adapter, tokens).as_text()
    products = [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]
    assert sum("xi8>" in line for line in products) == 7
    assert sum("xf32>" in line and "xi8>" not in line for line in products) >= 2 * 7 + 1 + 2
    assert model.arithmetic == "float32, base in int8, matmuls with it in int8"


# ---- recipes and chips


@pytest.mark.parametrize("model", ["smollm2", {"name": "smollm2", "quantize": "auto"}])
def test_products_imply_the_format_of_the_base(model: Any) -> None:
    for format in FORMATS:
        recipe = load_recipe({"model": model, "data": "chats.jsonl", "engine": {"matmul": format}})
        assert recipe.model.quantize == format
        assert stages_of(recipe)[0].recipe.model.quantize == format
        assert load_recipe(recipe.model_dump(mode="json", exclude_none=True)).model.quantize == format
    assert load_recipe({"model": "smollm2", "data": "chats.jsonl"}).engine.matmul == "full"


@pytest.mark.parametrize("quantize", ["none", "int4", "nf4", "fp8"])
def test_a_base_in_another_format_is_refused(quantize: str) -> None:
    model = {"name": "smollm2", "quantize": quantize}
    with pytest.raises(TrilloraError, match=f"an int8 base, but model.quantize is {quantize}") as error:
        load_recipe({"model": model, "data": "chats.jsonl", "engine": {"matmul": "int8"}})
    assert "engine.matmul" in str(error.value.where)
    assert error.value.do == "set model.quantize to int8, or engine.matmul to full"


@pytest.mark.parametrize(
    ("kind", "platform", "allowed"),
    [
        ("TPU v5 lite", "tpu", {"int8"}),
        ("TPU v6 lite", "tpu", {"int8"}),
        ("TPU v4", "tpu", set()),
        ("TPU7x", "tpu", set()),
        ("NVIDIA H200", "gpu", {"fp8"}),
        ("NVIDIA L4", "gpu", {"fp8"}),
        ("NVIDIA A100-SXM4-80GB", "gpu", set()),
        ("Tesla V100-SXM2-16GB", "gpu", set()),
        ("a card of the future", "gpu", {"int8", "fp8"}),
        ("cpu", "cpu", {"int8", "fp8"}),
    ],
)
def test_products_that_are_not_faster_are_refused(kind: str, platform: str, allowed: set[str]) -> None:
    device = SimpleNamespace(platform=platform, device_kind=kind)
    check_products(device, "full")
    for format in FORMATS:
        if format in allowed:
            check_products(device, format)
            continue
        with pytest.raises(TrilloraError, match=f"Matmuls in {format} are not faster") as error:
            check_products(device, format)
        assert error.value.where == "engine.matmul"
        assert error.value.do == " or ".join(["use engine.matmul=full", *(f"engine.matmul={f}" for f in allowed)])


# ---- preflight


@pytest.mark.parametrize(
    ("chip", "kind", "expected"),
    [
        (CHIPS["v6e"], "s8", 0.5),
        (CHIPS["v5e"], "bf16", 1.0),
        (CHIPS["v4"], "s8", 1.0),
        (GPUS["H200"], "f8e4m3fn", 0.5),
        (GPUS["H200"], "s8", 0.5),
    ],
)
def test_simulated_products_of_eight_bits_take_less_time(chip: Any, kind: str, expected: float) -> None:
    def seconds(kind: str) -> tuple[float, float]:
        program = f"""HloModule step, is_scheduled=true

ENTRY %main (x: {kind}[8192,8192], w: {kind}[8192,8192]) -> bf16[8192,8192] {{
  %x = {kind}[8192,8192]{{1,0}} parameter(0)
  %w = {kind}[8192,8192]{{1,0}} parameter(1)
  ROOT %y = bf16[8192,8192]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
}}
"""
        found = simulate(program, chip, 1)
        return found.compute_seconds, found.roofline_seconds

    low, full = seconds(kind), seconds("bf16")
    rate = 1 if expected == 1 or chip in GPUS.values() else TPU_8_BITS / 2  # of the public one, that programs reach
    assert low[0] == pytest.approx(expected / rate * full[0]) and low[1] == pytest.approx(expected * full[1])


TILED_AGAIN = """HloModule step, is_scheduled=true

%tiled (all: s8[16,1024,1024]) -> s8[16,1024,1024] {
  %all = s8[16,1024,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy = s8[16,1024,1024]{2,1,0:T(8,128)(4,1)} copy(%all)
}

%layer (stack: s8[16,1024,1024], at: s32[]) -> s8[1,1024,1024] {
  %stack = s8[16,1024,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  %at = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  %again = s8[16,1024,1024]{2,1,0:T(8,128)(4,1)} fusion(%stack), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, \
calls=%tiled
  ROOT %slice = s8[1,1024,1024]{2,1,0:T(8,128)(4,1)} dynamic-slice(%again, %at, %zero, %zero), \
dynamic_slice_sizes={1,1024,1024}
}

ENTRY %main (w: s8[16,1024,1024], n: s32[]) -> s8[1,1024,1024] {
  %w = s8[16,1024,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  %n = s32[]{:T(128)} parameter(1)
  ROOT %one = s8[1,1024,1024]{2,1,0:T(32,128)(4,1)S(1)} fusion(%w, %n), kind=kLoop, calls=%layer
}
"""


def test_weights_that_are_tiled_again_before_they_are_sliced_are_not_read_whole() -> None:
    """As the TPU compiler writes it: only the weights of one layer are read and processed."""
    program = parse(TILED_AGAIN)
    work, entry = Work(program, 1), program.entry
    assert work.hbm_bytes(entry, entry.root) == 1024 * 1024
    assert work.vector_operations(entry, entry.root) == 1024 * 1024


def test_the_estimate_counts_rounded_products_at_their_rate() -> None:
    def estimated(*overrides: str) -> Any:
        source = {"model": {"name": "llama", "dtype": "bfloat16"}, "data": "chats.jsonl"}
        options = ["train.sequence_length=2048", "train.batch_size=8", "train.steps=10", "engine.remat=linear"]
        [stage] = stages_of(load_recipe(source, [*options, *overrides]))
        config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=2, num_key_value_heads=8)
        return by_estimate(StepSearch(stage.recipe, config, find_slice("v6e-1"), 10))

    full, base, rounded = (estimated(*o) for o in ([], ["model.quantize=int8"], ["engine.matmul=int8"]))
    assert rounded.settings.matmul == "int8" and rounded.settings.quantize == "int8"
    assert rounded.memory["base"] == base.memory["base"] < full.memory["base"]
    assert rounded.step.roofline_seconds < 0.8 * base.step.roofline_seconds
    assert rounded.step.seconds < 0.95 * base.step.seconds


def test_steps_with_fp8_products_are_compiled_for_cublas() -> None:
    """XLA's own kernels would take their place: with them, no product of a step compiled for an H200 was cuBLAS's."""
    [stage] = stages_of(load_recipe({"model": "llama", "data": "chats.jsonl"}))
    gpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")]), size=1)
    cublas = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": "0"}
    for matmul, expected in (("fp8", cublas), ("full", {})):
        fixed = {"layers": "scan", "attention": "xla", "loss_chunk": 64, "remat": "none", "micro_batch_size": 8}
        options = given_settings(stage.recipe) | fixed | {"dtype": "float32", "matmul": matmul}
        options |= {"quantize": "none" if matmul == "full" else matmul}
        settings = StepSettings(**{"backend": "gpu", "num_devices": 1, "mesh": MeshSection(), **options})
        mesh = make_mesh(jax.devices()[:1], MeshShape())
        step = assemble(stage.recipe, settings, tiny_run.llama(num_layers=1), mesh, 1)
        assert dataclasses.replace(step, mesh=gpu)._options == expected


# ---- runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("rounded"), tiny_run.llama(num_layers=1))


def recipe(folder: Path, seed: int, **sections: Any) -> dict[str, Any]:
    return tiny_run.recipe(folder, train={"steps": 20, "seed": seed, "checkpoint_every": 10}, **sections)


def run(folder: Path, matmul: str, seed: int) -> Path:
    out = folder / f"{matmul}-{seed}"
    if not out.exists():
        train(load_recipe(recipe(folder, seed, engine={"matmul": matmul})), out)
    return out


def test_a_run_says_how_it_computed(folder: Path) -> None:
    out = run(folder, "int8", 0)
    said = "float32, base in int8, matmuls with it in int8"
    assert json.loads((out / "run.json").read_text())["model"]["arithmetic"] == said
    assert said in (out / "report.html").read_text()
    assert "matmul: int8" in (out / "resolved.yaml").read_text()
    card = (out / "adapter" / "README.md").read_text()
    assert "| base in memory | int8 |" in card and "| matmuls with the base | int8" in card
    assert load_run_recipe(out).recipe.engine.matmul == "int8"
    assert Generator.open(str(out)).model.arithmetic == "float32, base in int8"  # the same base, full products


def test_a_run_resumes_only_with_the_same_products(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    tiny_run.copy_interrupted(run(folder, "int8", 0), out, 10)
    model = {"name": str(folder / "model"), "quantize": "int8"}
    with pytest.raises(TrilloraError, match=r'engine\.matmul was "int8" and is "full"\.'):
        train(load_recipe(recipe(folder, 0, model=model)), out)


def test_a_checkpoint_of_a_version_without_an_option_has_its_default() -> None:
    now = fixed_options(load_recipe({"model": "smollm2", "data": "chats.jsonl"}))
    before = {key: value for key, value in now.items() if key != "engine.matmul"}
    assert differences(before, now) and not differences(with_defaults(before, now), now)
    rounded = {**now, "engine.matmul": "int8"}
    assert differences(with_defaults(before, rounded), rounded) == ['engine.matmul was "full" and is "int8"']


def test_a_certificate_says_how_training_computed() -> None:
    def said(*overrides: str) -> list[str]:
        given = load_recipe({"model": "smollm2", "data": "chats.jsonl"}, overrides)
        subject: Any = SimpleNamespace(recipe=given)
        return [check.what for check in check_arithmetic(subject)]

    assert said() == []
    assert said("model.quantize=nf4")[0].startswith("Training used a base in nf4; ")
    assert said("engine.matmul=int8")[0].startswith("Training used a base in int8 and matmuls with it in int8; ")


def apart(one: list[float], other: list[float]) -> float:
    return float(np.mean(np.abs(np.subtract(one, other))))


def test_losses_are_within_the_spread_of_two_seeds(folder: Path) -> None:
    (full, other), rounded = (tiny_run.losses(run(folder, "full", seed)) for seed in (0, 1)), run(folder, "int8", 0)
    losses = tiny_run.losses(rounded)
    assert losses[-1] < 0.7 * losses[0]
    assert 0 < apart(losses, full) < apart(full, other)


@full_dose_only
@pytest.mark.parametrize("matmul", FORMATS)
def test_losses_of_smollm2_on_real_data_are_within_the_spread_of_two_seeds(tmp_path: Path, matmul: str) -> None:
    def losses(matmul: str, seed: int) -> list[float]:
        source = {
            "model": "smollm2",
            "data": {"path": str(DATA / "train.jsonl")},
            "train": {"sequence_length": 128, "batch_size": 2, "steps": 60, "learning_rate": 1e-3, "seed": seed},
            "engine": {"matmul": matmul},
        }
        out = tmp_path / f"{matmul}-{seed}"
        train(load_recipe(source), out)
        found = tiny_run.losses(out)
        return [float(np.mean(found[step : step + 10])) for step in range(0, 60, 10)]  # batches differ by their seed

    full, other, rounded = losses("full", 0), losses("full", 1), losses(matmul, 0)
    assert rounded[-1] < 0.5 * rounded[0]
    assert 0 < apart(rounded, full) < apart(full, other)
