"""Grouped matmuls mapped over lanes equal each lane's alone, in values and gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trillora.engine.mixture.grouped_product import GroupedForm, adapted_product, grouped_product, kernel_for, tiles_of

LANES, ROWS, GROUPS, INPUTS, OUTPUTS = 3, 8, 4, 5, 6
ROUNDING = 1e-5  # float32 sums in another order


def values(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def loss(product: Any) -> Any:
    def of(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        out = product(rows, weights, sizes)
        return (jnp.sin(out) * jnp.arange(1, out.size + 1).reshape(out.shape)).sum()

    return of


@pytest.mark.parametrize("weights_dim", [None, 0], ids=["one set of weights", "weights of each lane"])
def test_lanes_together_equal_each_lane_alone(weights_dim: int | None) -> None:
    """Some groups are empty. The reference is jax's own product and its derivative."""
    rows = values(LANES, ROWS, INPUTS)
    weights = values(*(() if weights_dim is None else (LANES,)), GROUPS, INPUTS, OUTPUTS, seed=1)
    sizes = jnp.asarray([[2, 0, 5, 1], [0, 0, 8, 0], [3, 3, 0, 2]], jnp.int32)

    def together(product: Any) -> Any:
        return jax.vmap(jax.value_and_grad(loss(product), argnums=(0, 1)), in_axes=(0, weights_dim, 0))

    total, gradients = jax.jit(together(grouped_product))(rows, weights, sizes)
    for lane in range(LANES):
        own = weights if weights_dim is None else weights[lane]
        expected = jax.value_and_grad(loss(jax.lax.ragged_dot), argnums=(0, 1))(rows[lane], own, sizes[lane])
        found = (total[lane], tuple(gradient[lane] for gradient in gradients))
        for ours, reference in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(ours, reference, rtol=ROUNDING, atol=ROUNDING * float(jnp.abs(reference).max()))


@pytest.mark.parametrize("lanes", [False, True], ids=["alone", "lanes"])
def test_product_with_an_adapter_equals_three_products(lanes: bool) -> None:
    """In values and gradients. Lanes have rows and adapters of their own and share the weights."""
    rows, a, b = (
        values(LANES, ROWS, INPUTS),
        values(LANES, GROUPS, 2, INPUTS, seed=1),
        values(LANES, GROUPS, 2, OUTPUTS),
    )
    weights, sizes = values(GROUPS, OUTPUTS, INPUTS, seed=2), jnp.asarray([2, 0, 5, 1], jnp.int32)

    def ours(rows: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return loss(lambda *_: adapted_product(rows, weights, a, b, sizes, GroupedForm(outputs_first=True)))(
            rows, weights, sizes
        )

    def reference(rows: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        inner = jax.lax.ragged_dot(rows, a.swapaxes(1, 2), sizes)
        out = jax.lax.ragged_dot(rows, weights.swapaxes(1, 2), sizes) + jax.lax.ragged_dot(inner, b, sizes)
        return loss(lambda *_: out)(rows, weights, sizes)

    def of(function: Any) -> Any:
        return jax.value_and_grad(function, argnums=(0, 1, 2))

    mapped = jax.vmap(of(ours)) if lanes else functools.partial(jax.lax.map, lambda given: of(ours)(*given))
    found = jax.jit(mapped)(*((rows, a, b) if lanes else ((rows, a, b),)))
    for lane in range(LANES):
        expected = of(reference)(rows[lane], a[lane], b[lane])
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one[lane], other, rtol=ROUNDING, atol=ROUNDING * float(jnp.abs(other).max()))


def test_rows_are_kept_only_for_weights_that_are_trained() -> None:
    rows, weights, sizes = values(ROWS, INPUTS), values(GROUPS, INPUTS, OUTPUTS), jnp.asarray([2, 0, 5, 1], jnp.int32)

    def products(which: int | tuple[int, ...]) -> int:
        return str(jax.make_jaxpr(jax.grad(loss(grouped_product), which))(rows, weights, sizes)).count("ragged_dot_gen")

    assert products(0) == 2 and products((0, 1)) == 3


@pytest.mark.parametrize("outputs_first", [False, True])
def test_the_kernel_of_tpus_equals_jaxs_product(outputs_first: bool) -> None:
    """In the interpreter. The last 56 rows have no group, and anything may be in their results."""
    rows, weights = values(256, 256), values(3, *((384, 256) if outputs_first else (256, 384)), seed=1)
    sizes = jnp.asarray([130, 0, 70], jnp.int32)
    kernel = GroupedForm(outputs_first, padded=1.28, kernel="megablox", interpret=True)
    assert tiles_of(256, 3, 256, 384) == (128, 256, 384)

    def together(form: GroupedForm) -> Any:
        def of_groups(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
            return grouped_product(rows, weights, sizes, form)[:200]

        total, (of_rows, of_weights) = jax.jit(jax.value_and_grad(loss(of_groups), argnums=(0, 1)))(
            rows, weights, sizes
        )
        return total, of_rows[:200], of_weights

    ours, reference = together(kernel), together(GroupedForm(outputs_first))
    for own, expected in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(own, expected, rtol=ROUNDING, atol=ROUNDING * float(jnp.abs(expected).max()))


def test_tiles_fit_in_the_kernels_memory() -> None:
    assert tiles_of(20480, 16, 2048, 1536) == (256, 2048, 768)
    assert tiles_of(10240, 16, 768, 2048) == (128, 768, 2048)
    assert tiles_of(40960, 8, 5760, 2880) == (256, 1920, 1024)
    assert tiles_of(20480, 16, 16, 1536) is None and tiles_of(100, 4, 2048, 1536) is None


def test_kernels_are_used_where_they_fit() -> None:
    class Device:
        def __init__(self, capability: str | None) -> None:
            self.platform, self.compute_capability = "gpu", capability

    found = {name: kernel_for(Device(name)) for name in ("7.5", "8.0", "8.9", "9.0", "gfx942", None)}
    assert [name for name, kind in found.items() if kind == "triton"] == ["8.0", "9.0"]
    assert kernel_for(jax.devices("cpu")[0]) == "xla"
