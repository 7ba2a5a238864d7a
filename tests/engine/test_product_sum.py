"""Sums of products: the kernel for Hopper GPUs in jax's interpreter, what uses it, and what preflight makes of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dose import slow_case
from transformers import AutoConfig

from trillora.devices.chips import GPUS
from trillora.engine.kernels.joined_linear import joined_linear, linear_and_low, lora_linear
from trillora.engine.kernels.product_sum import IN_XLA, Products, Tiles, is_supported, product_sum
from trillora.model.bridge import CausalLM
from trillora.model.lora_spec import LoraSpec
from trillora.preflight.estimate.traced import Value, read_program
from trillora.preflight.hlo.simulate import simulate
from trillora.step.build import products_on

ROWS, COLUMNS = 256, 256  # two blocks
SIZES: Any = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "vocab_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def draw(number: int, *shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jax.random.normal(jax.random.key(number), shape).astype(dtype)


def pairs_of(inner: list[int], *, transposed: bool, rows: int = ROWS, dtype: Any = jnp.bfloat16) -> list[Any]:
    shapes = [((rows, size), (COLUMNS, size) if transposed else (size, COLUMNS)) for size in inner]
    return [
        (draw(2 * i, *left, dtype=dtype), draw(2 * i + 1, *right, dtype=dtype))
        for i, (left, right) in enumerate(shapes)
    ]


def in_numpy(pairs: Any, addend: Any, *, transposed: bool) -> np.ndarray:
    total = 0.0 if addend is None else np.asarray(addend, np.float64)
    for left, right in pairs:
        matrix = np.asarray(right, np.float64)
        total = total + np.asarray(left, np.float64) @ (matrix.T if transposed else matrix)
    return np.asarray(total)


# ---- the kernel


@pytest.mark.parametrize(
    ("inner", "transposed", "is_added"),
    [([320, 64, 64], False, True), slow_case([320, 64], True, False), slow_case([64], False, False)],
)
def test_the_kernel_computes_the_sum(inner: list[int], transposed: bool, is_added: bool) -> None:
    """One processor: two blocks one after the other, and more steps than places in the ring."""
    interpreter = pytest.importorskip(
        "jax._src.pallas.mosaic_gpu.interpret.params", reason="this jax has no interpreter for Mosaic GPU"
    )
    pairs = pairs_of(inner, transposed=transposed)
    addend = draw(99, ROWS, COLUMNS, dtype=jnp.bfloat16) if is_added else None
    on = Products(1, interpreter.InterpretGPUParams())
    assert sum(inner) // Tiles().inner > Tiles().places or inner == [64]
    found = product_sum(pairs, addend, transposed=transposed, on=on)
    exact = in_numpy(pairs, addend, transposed=transposed)
    assert found.shape == exact.shape and found.dtype == jnp.bfloat16
    # Rounded once: within half of the last place of a bfloat16, and float32's own rounding.
    assert (np.abs(np.asarray(found, np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-3).all()


@pytest.mark.parametrize(
    ("rows", "inner", "dtype", "processors", "expected"),
    [
        (ROWS, 128, jnp.bfloat16, 2, True),
        (ROWS, 128, jnp.bfloat16, 0, False),  # not a Hopper GPU
        (ROWS, 128, jnp.bfloat16, 3, False),  # fewer blocks than processors
        (ROWS - 8, 128, jnp.bfloat16, 1, False),
        (ROWS, 120, jnp.bfloat16, 1, False),
        (ROWS, 128, jnp.float32, 1, False),
    ],
)
def test_the_kernel_takes_whole_blocks_of_bfloat16(
    rows: int, inner: int, dtype: Any, processors: int, expected: bool
) -> None:
    pairs = pairs_of([inner], transposed=True, rows=rows, dtype=dtype)
    assert is_supported(pairs, COLUMNS, processors) == expected
    assert not is_supported(pairs, COLUMNS - 64, processors)


@pytest.mark.parametrize("transposed", [True, False])
def test_xla_computes_the_sum_elsewhere(transposed: bool) -> None:
    pairs = [(left.reshape(2, 4, -1), right) for left, right in pairs_of([12, 3], transposed=transposed, rows=8)]
    addend = draw(9, 2, 4, COLUMNS, dtype=jnp.bfloat16)
    found = product_sum(pairs, addend, transposed=transposed, on=IN_XLA)
    assert found.shape == (2, 4, COLUMNS)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), in_numpy(pairs, addend, transposed=transposed), rtol=0.02, atol=0.05
    )


@pytest.mark.parametrize(
    ("platform", "capability", "expected"),
    [("gpu", "9.0", 132), ("gpu", "8.0", 0), ("gpu", "10.0", 0), ("gpu", "12.0", 0), ("cpu", "", 0), ("tpu", "", 0)],
)
def test_only_hopper_gpus_use_the_kernel(platform: str, capability: str, expected: int) -> None:
    device = SimpleNamespace(platform=platform, compute_capability=capability, core_count=132)
    assert products_on(device) == Products(expected)


# ---- linear layers


def assert_same(one: Any, other: Any) -> None:
    for ours, plain in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4 * float(jnp.abs(plain).max()))


def values_and_gradients(function: Any, arguments: Any) -> Any:
    """With another weight for each number of the outputs."""

    def loss(*arguments: Any) -> jax.Array:
        leaves = jax.tree.leaves(function(*arguments))
        return sum((leaf * draw(50 + i, *leaf.shape)).sum() for i, leaf in enumerate(leaves))  # type: ignore[return-value]

    return function(*arguments), jax.jit(jax.grad(loss, tuple(range(len(arguments)))))(*arguments)


@pytest.mark.parametrize("ranks", [(2,), (2, 3, 2), (64, 32, 40)])  # the last ones take three steps of the kernel
def test_layers_with_lora_equal_plain_jax(ranks: tuple[int, ...]) -> None:
    x, weights = draw(0, 2, 5, 6), [draw(10 + n, 4 + n, 6) for n in range(len(ranks))]
    matrices = [(draw(20 + n, rank, 6), draw(30 + n, 4 + n, rank)) for n, rank in enumerate(ranks)]
    addend = draw(40, 2, 5, 4) if len(ranks) == 1 else None

    def ours(x: jax.Array, matrices: Any, addend: Any) -> Any:
        return lora_linear(x, weights, matrices, addend, IN_XLA, "low")

    def plain(x: jax.Array, matrices: Any, addend: Any) -> Any:
        outputs = [x @ weight.T + x @ a.T @ b.T for weight, (a, b) in zip(weights, matrices, strict=True)]
        return tuple(outputs) if addend is None else (outputs[0] + addend,)

    arguments = (x, matrices, addend)
    assert_same(values_and_gradients(ours, arguments), values_and_gradients(plain, arguments))


def test_parts_of_a_gated_mlp_equal_plain_jax() -> None:
    x, weights, a = draw(0, 5, 6), [draw(1, 4, 6), draw(2, 4, 6)], draw(3, 4, 6)
    joined = (lambda x, a: joined_linear(x, weights, a, IN_XLA), lambda x, a: ([x @ w.T for w in weights], x @ a.T))
    assert_same(*(values_and_gradients(function, (x, a)) for function in joined))
    low, b, addend = draw(4, 5, 2), draw(5, 4, 2), draw(6, 5, 4)
    summed = (
        lambda x, low, b, addend: linear_and_low(x, weights[0], low, b, addend, IN_XLA),
        lambda x, low, b, addend: x @ weights[0].T + low @ b.T + addend,
    )
    assert_same(*(values_and_gradients(function, (x, low, b, addend)) for function in summed))


# ---- preflight

PROGRAM = """
HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[8192,4096], l: bf16[8192,64], w: bf16[4096,4096], b: bf16[4096,64]) -> bf16[8192,4096] {
  %x = bf16[8192,4096]{1,0} parameter(0)
  %l = bf16[8192,64]{1,0} parameter(1)
  %w = bf16[4096,4096]{1,0} parameter(2)
  %b = bf16[4096,64]{1,0} parameter(3)
  ROOT %sum = bf16[8192,4096]{1,0} custom-call(%x, %l, %w, %b, %x), custom_call_target="mosaic_gpu_v2", \
backend_config={kernel_hash = "3\\BC", module = "ML\\EFR"}
}
"""


def test_a_simulated_program_counts_all_products_of_a_sum() -> None:
    assert simulate(PROGRAM, GPUS["H200"], 1).flops == 2 * 8192 * 4096 * (4096 + 64)


def test_a_model_uses_the_kernel_and_an_estimate_counts_all_products() -> None:
    """Traced for a GPU with one processor, and not run."""
    config = AutoConfig.for_model("llama", **SIZES, pad_token_id=0)
    flops = []
    for products in (Products(1), IN_XLA):
        model = CausalLM(
            config, dtype="bfloat16", lora=LoraSpec(rank=2), remat="none", kernels="fused", products=products
        )
        base, adapter = (
            {key: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for key, leaf in layout.items()}
            for layout in (model.layout, model.adapter_layout)
        )
        tokens = jax.ShapeDtypeStruct((1, ROWS), jnp.int32)

        def loss(adapter: Any, base: Any, tokens: Any, model: CausalLM = model) -> jax.Array:
            return model.hidden(base, adapter, {"tokens": tokens}).astype(jnp.float32).sum()

        closed = jax.make_jaxpr(jax.value_and_grad(loss))(adapter, base, tokens)
        inputs = [Value(aval.shape, aval.dtype.itemsize, (1,) * len(aval.shape)) for aval in closed.in_avals]
        operations = read_program(closed, inputs, 1, ()).operations
        sums = [operation for operation in operations if operation.name == "product_sum"]
        # q, k, v, o and down; the gradients of what o, and gate and up, are computed from. The first layer needs no
        # gradient of what q, k and v are computed from.
        assert len(sums) == (7 if products.processors else 0)
        flops.append(sum(operation.flops for operation in operations))
    assert flops[0] == flops[1]
