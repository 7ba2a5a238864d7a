"""The middle of a gated MLP in one kernel, in the Pallas interpreter, equals PyTorch's float64 autograd."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from gpu_lowering import lowered_for_a_gpu
from torch.nn import functional

from trillora.engine.kernels.gated_mlp import Activation, Middle, MlpBlocks, MlpForm, is_supported, middle, padded_rank

FEW = MlpBlocks(rows=16, columns=32, programs=4)  # so that a program has several blocks
# Relative to the largest value. float32: sums in another order, and the kernels' error function. bfloat16: inputs are
# exact, h and the gradients dg and du are rounded once (2**-9) and then summed.
ROUNDING = {"float32": 1e-5, "bfloat16": 2**-7}
IN_TORCH = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda g: functional.gelu(g, approximate="tanh"),
}


def values(*shape: int, seed: int, dtype: Any = "float32", scale: float = 1.0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, dtype)


def inputs(num_rows: int, width: int, rank: int, dtype: str) -> tuple[Middle, jax.Array, jax.Array]:
    """Also the gradients of both results."""
    wide = [values(num_rows, width, seed=seed, dtype=dtype, scale=2) for seed in (0, 1)]
    low = values(num_rows, 2 * rank, seed=2, dtype=dtype)
    weights = [values(*shape, seed=3 + n, dtype=dtype, scale=0.2) for n, shape in enumerate([(width, rank)] * 2)]
    given = Middle(*wide, low, *weights, values(rank, width, seed=5, dtype=dtype, scale=0.2))
    return given, values(num_rows, width, seed=6, dtype=dtype), values(num_rows, rank, seed=7, dtype=dtype)


def expected(given: Middle, activation: Activation, dh: jax.Array, dld: jax.Array) -> list[np.ndarray]:
    """Both results and the gradients of all inputs, by PyTorch in float64."""
    leaves = [torch.tensor(np.asarray(leaf, np.float64), requires_grad=True) for leaf in given]
    g0, u0, low, bg, bu, ad = leaves
    lg, lu = low.chunk(2, dim=1)
    h = IN_TORCH[activation](g0 + lg @ bg.T) * (u0 + lu @ bu.T)
    ld = h @ ad.T
    gradients = [torch.tensor(np.asarray(each, np.float64)) for each in (dh, dld)]
    return [each.detach().numpy() for each in (h, ld, *torch.autograd.grad([h, ld], leaves, gradients))]


@pytest.mark.parametrize(
    ("num_rows", "width", "rank", "activation", "dtype", "blocks"),
    [
        (64, 128, 16, "silu", "float32", None),  # without kernels
        (16, 16, 32, "gelu", "bfloat16", None),
        (64, 128, 16, "silu", "float32", MlpBlocks()),
        (64, 128, 16, "silu", "bfloat16", MlpBlocks()),
        (70, 192, 32, "gelu", "float32", MlpBlocks()),  # the last tile of rows is not full
        (33, 48, 64, "gelu_tanh", "bfloat16", MlpBlocks()),  # blocks of 16 columns
        (5, 16, 16, "gelu_tanh", "float32", MlpBlocks()),  # less than a block
        (256, 128, 16, "silu", "float32", FEW),  # 16 tiles of rows in 1 part, 4 blocks of columns in 1 part
        (16 * 7 - 3, 96, 16, "gelu", "bfloat16", FEW),  # 7 tiles in 2 parts: the last tile is beyond the last row
    ],
)
def test_results_and_gradients_are_pytorchs(
    num_rows: int, width: int, rank: int, activation: Activation, dtype: str, blocks: MlpBlocks | None
) -> None:
    given, *gradients = inputs(num_rows, width, rank, dtype)
    form = MlpForm(activation, "xla") if blocks is None else MlpForm(activation, interpret=True, blocks=blocks)

    @jax.jit
    def compute(given: Middle, gradients: tuple[jax.Array, ...]) -> list[jax.Array]:
        results, pull = jax.vjp(lambda given: middle(given, form), given)
        return [*results, *pull(gradients)[0]]

    found = compute(given, tuple(gradients))
    assert {str(each.dtype) for each in found} == {dtype}
    for ours, theirs in zip(found, expected(given, activation, *gradients), strict=True):
        error = np.abs(np.asarray(ours, np.float64) - theirs).max()
        assert error <= ROUNDING[dtype] * np.abs(theirs).max()


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_activations_of_extreme_values_are_finite(activation: Activation) -> None:
    given, dh, dld = inputs(16, 16, 16, "float32")
    extreme = jnp.broadcast_to(jnp.asarray([-1e4, -100, -20, 0, 20, 100, 1e4, -0.0] * 2, jnp.float32), (16, 16))
    given = given._replace(g0_MF=extreme, bg_FR=jnp.zeros((16, 16)))
    results, pull = jax.vjp(lambda given: middle(given, MlpForm(activation, interpret=True)), given)
    for each in (*results, *pull((dh, dld))[0]):
        assert jnp.isfinite(each).all()
    slope = pull((jnp.ones_like(dh), jnp.zeros_like(dld)))[0].g0_MF
    up = given.u0_MF + given.low_MQ[:, 16:] @ given.bu_FR.T
    np.testing.assert_allclose((slope / up)[0, [0, 6]], [0, 1], atol=1e-6)


def test_only_the_outputs_of_the_base_are_kept_for_the_backward_pass() -> None:
    """Of wide arrays: not g, u or h, which would double the memory."""
    given, *_ = inputs(32, 64, 16, "float32")

    def adapted(low: jax.Array, ad: jax.Array, frozen: jax.Array) -> jax.Array:
        h, ld = middle(given._replace(low_MQ=low, ad_RF=ad), MlpForm("silu", interpret=True))
        return h @ frozen.T + ld @ given.bg_FR.T[:, :48]

    _, pull = jax.vjp(lambda low, ad: adapted(low, ad, values(48, 64, seed=9)), given.low_MQ, given.ad_RF)
    kept = [leaf for leaf in jax.tree.leaves(pull) if leaf.shape == (32, 64)]
    assert len(kept) == 2
    for leaf, of_base in zip(kept, (given.g0_MF, given.u0_MF), strict=True):
        np.testing.assert_array_equal(leaf, of_base)


def test_shapes_that_the_kernels_can_compute() -> None:
    assert [padded_rank(4, 8, 16), padded_rank(8, 24, 8), padded_rank(64), padded_rank(65)] == [16, 32, 64, None]
    assert is_supported(100, 8192, jnp.bfloat16)
    assert not is_supported(100, 8192, jnp.float32) and is_supported(100, 8192, jnp.float32, interpret=True)
    assert not is_supported(100, 8200, jnp.bfloat16)
    assert not is_supported(2**18, 2**13, jnp.bfloat16)


@pytest.mark.parametrize(
    ("num_rows", "width", "rank"), [(16384, 8192, 16), (8192, 14336, 16), (1000, 8960, 32), (8192, 4864, 64)]
)
def test_kernels_can_be_lowered_for_a_gpu(num_rows: int, width: int, rank: int) -> None:
    """At the sizes of 1B and 7B models, in bfloat16; and layers share the kernels."""
    shapes = [(num_rows, width), (num_rows, width), (num_rows, 2 * rank), (width, rank), (width, rank), (rank, width)]
    given = Middle(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))

    def two_layers(given: Middle) -> Any:
        def one(number: int, given: Middle) -> jax.Array:
            with jax.named_scope(f"layer_{number}"):
                h, ld = middle(given, MlpForm("silu"))
                return h.astype(jnp.float32).sum() + ld.astype(jnp.float32).sum()

        return jax.value_and_grad(lambda given: one(0, given) + one(1, given))(given)

    assert lowered_for_a_gpu(two_layers, given).count("__gpu$xla.gpu.triton") == 2
