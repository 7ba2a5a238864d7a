"""Products of rows with the matrix of their group, also under `jax.vmap`.

    rows [5, I], weights [3, I, O], sizes [2, 0, 3]     rows 0 and 1 times matrix 0, rows 2 to 4 times matrix 2: [5, O]

The product is `jax.lax.ragged_dot`. jax cannot map it over lanes that share the weights. Here the rows of all lanes are
then sorted by group, so that one product has all rows of a group. Weights that differ by lane become more groups.

Legend: M rows, E groups, I inputs, O outputs, K lanes.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@jax.custom_vjp
def grouped_product(rows_MI: jax.Array, weights_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[M, O]. Rows are sorted by group, and the sizes add up to M."""
    product: jax.Array = _product(rows_MI, weights_EIO, sizes_E)
    return product


def _forward(rows: Any, weights: Any, sizes: Any) -> tuple[jax.Array, Any]:
    """Keeps the rows only for weights that are trained."""
    kept = rows.value if weights.perturbed else None
    return _product(rows.value, weights.value, sizes.value), (kept, weights.value, sizes.value)


def _backward(kept: Any, gradient_MO: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
    rows_MI, weights_EIO, sizes_E = kept
    of_weights = None if rows_MI is None else _outer_products(rows_MI, gradient_MO, sizes_E)
    return _product(gradient_MO, weights_EIO.swapaxes(1, 2), sizes_E), of_weights, None


grouped_product.defvjp(_forward, _backward, symbolic_zeros=True)


@custom_vmap
def _product(rows_MI: jax.Array, weights_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(rows_MI, weights_EIO, sizes_E)


@_product.def_vmap
def _products_of_lanes(
    num_lanes: int, is_mapped: list[bool], rows: jax.Array, weights: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, bool]:
    rows_KMI, sizes_KE = _of_lanes(num_lanes, rows, is_mapped[0]), _of_lanes(num_lanes, sizes, is_mapped[2])
    all_rows = rows_KMI.reshape(-1, rows.shape[-1])
    if is_mapped[1]:
        out = jax.lax.ragged_dot(all_rows, weights.reshape(-1, *weights.shape[2:]), sizes_KE.reshape(-1))
    else:
        order = _order_by_group(sizes_KE, rows_KMI.shape[1])
        sorted_out = jax.lax.ragged_dot(all_rows[order], weights, sizes_KE.sum(0))
        out = jnp.zeros_like(sorted_out).at[order].set(sorted_out, unique_indices=True)
    return out.reshape(*rows_KMI.shape[:2], -1), True


@custom_vmap
def _outer_products(rows_MI: jax.Array, gradient_MO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """The sum of the outer products of each group's rows [E, I, O]."""
    return jax.lax.ragged_dot_general(rows_MI, gradient_MO, sizes_E, _OUTER)


@_outer_products.def_vmap
def _outer_products_of_lanes(
    num_lanes: int, is_mapped: list[bool], rows: jax.Array, gradient: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, bool]:
    given = zip((rows, gradient, sizes), is_mapped, strict=True)
    rows_KMI, gradient_KMO, sizes_KE = (_of_lanes(num_lanes, array, mapped) for array, mapped in given)
    all_rows, all_gradients = (array.reshape(-1, array.shape[-1]) for array in (rows_KMI, gradient_KMO))
    out = jax.lax.ragged_dot_general(all_rows, all_gradients, sizes_KE.reshape(-1), _OUTER)
    return out.reshape(*sizes_KE.shape, *out.shape[1:]), True


def _of_lanes(num_lanes: int, array: jax.Array, is_mapped: bool) -> jax.Array:
    return array if is_mapped else jnp.broadcast_to(array, (num_lanes, *array.shape))


def _order_by_group(sizes_KE: jax.Array, num_rows: int) -> jax.Array:
    """The order [K * M] that sorts the rows of all lanes by group."""
    ends_KE = jnp.cumsum(sizes_KE, axis=1)
    group_of = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(num_rows), side="right"))
    return jnp.argsort(group_of(ends_KE).reshape(-1), stable=True)
