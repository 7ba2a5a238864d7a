"""The grouped products for GPUs, in the Pallas interpreter, equal jax's own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_lowering import lowered_for_a_gpu

from trillora.engine.mixture.grouped_kernels import GroupedBlocks, is_supported, outer_products, product

SIZES = [37, 0, 90, 5]  # an empty group, groups larger and smaller than a tile
ROWS, INPUTS, OUTPUTS = 140, 48, 32  # the last 8 rows have no group
BLOCKS = GroupedBlocks(rows=32, outputs=16, inputs=16)
ROUNDING = 1e-5  # float32 sums in another order, relative to the largest value


def values(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def assert_equal(found: jax.Array, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())


@pytest.mark.parametrize("transposed", [False, True], ids=["inputs first", "outputs first"])
@pytest.mark.parametrize("rank", [8, 16, 96])
def test_product_with_low_rank_equals_two_ragged_products(transposed: bool, rank: int) -> None:
    rows, weights, sizes = values(ROWS, INPUTS), values(len(SIZES), INPUTS, OUTPUTS, seed=1), jnp.asarray(SIZES)
    low_rank = values(ROWS, rank, seed=2), values(len(SIZES), rank, OUTPUTS, seed=3)
    expected = jax.lax.ragged_dot(rows, weights, sizes) + jax.lax.ragged_dot(*low_rank, sizes)
    given = weights.swapaxes(1, 2) if transposed else weights
    found = product(rows, given, sizes, low_rank, transposed=transposed, blocks=BLOCKS, interpret=True)
    assert_equal(found, expected)
    assert not found[sum(SIZES) :].any()


def test_product_with_a_thin_matrix_equals_ragged_product() -> None:
    rows, a_ERI, sizes = values(ROWS, INPUTS), values(len(SIZES), 8, INPUTS, seed=1), jnp.asarray(SIZES)
    found = product(rows, a_ERI, sizes, transposed=True, interpret=True)
    assert_equal(found, jax.lax.ragged_dot(rows, a_ERI.swapaxes(1, 2), sizes))


@pytest.mark.parametrize("rank", [8, 16])
def test_outer_products_equal_sums_over_each_groups_rows(rank: int) -> None:
    left, right = values(ROWS, rank), values(ROWS, OUTPUTS, seed=1)
    parts = [np.split(np.asarray(array), np.cumsum(SIZES))[:-1] for array in (left, right)]
    expected = np.stack([of_left.T @ of_right for of_left, of_right in zip(*parts, strict=True)])
    assert_equal(outer_products(left, right, jnp.asarray(SIZES), blocks=BLOCKS, interpret=True), expected)


def test_kernels_can_be_lowered_for_a_gpu() -> None:
    """With the block sizes of training, in bfloat16."""
    rows, weights = values(256, 128).astype(jnp.bfloat16), values(4, 256, 128).astype(jnp.bfloat16)
    inner, low = values(256, 16).astype(jnp.bfloat16), values(4, 16, 256).astype(jnp.bfloat16)
    sizes = jnp.asarray([100, 0, 100, 56], jnp.int32)
    assert is_supported(rows, weights, inner, low) and not is_supported(values(256, 128))
    assert not is_supported(values(256, 72).astype(jnp.bfloat16))

    def all_three(rows: jax.Array, weights: jax.Array, inner: jax.Array, low: jax.Array) -> Any:
        wide = product(rows, weights, sizes, (inner, low), transposed=True)
        return product(wide, low, sizes, transposed=True), outer_products(inner, wide, sizes)

    assert lowered_for_a_gpu(all_three, rows, weights, inner, low).count("__gpu$xla.gpu.triton") == 3


def test_layers_share_a_kernel() -> None:
    def layers(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        for number in range(3):
            with jax.named_scope(f"layer_{number}"):
                rows = product(rows, weights, sizes)
        return rows

    rows, weights = values(64, 128).astype(jnp.bfloat16), values(2, 128, 128).astype(jnp.bfloat16)
    assert lowered_for_a_gpu(layers, rows, weights, jnp.asarray([40, 24])).count("__gpu$xla.gpu.triton") == 1
