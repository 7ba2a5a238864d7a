"""Products of rows with the matrix of their group, also under `jax.vmap`.

    rows [5, I], weights [3, I, O], sizes [2, 0, 3]     rows 0 and 1 times matrix 0, rows 2 to 4 times matrix 2: [5, O]

The product is `jax.lax.ragged_dot`. jax cannot map it over lanes that share the weights. Here the rows of all lanes are
then sorted by group, so that one product has all rows of a group. Weights that differ by lane become more groups.

There may be more rows than the sizes add up to. A TPU does not compute those at the end and leaves what was in memory.

Legend: M rows, E groups, I inputs, O outputs, K lanes.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.experimental.xla_metadata import set_xla_metadata

LANES = 128  # a TPU's arrays are tiles of 8 x 128
ROW_TILES = (256, 128)
TILES_PER_GROUP = 4  # of 256 rows, at least, on average: a tile in which a group ends is computed twice
TILE_BYTES = 12 * 2**20  # of the 16 MiB that a kernel may use

_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(rows_MI: jax.Array, weights_EIO: jax.Array, sizes_E: jax.Array, padded: bool = False) -> jax.Array:
    """[M, O]. Rows are sorted by group, and the sizes add up to M. If `padded`, they may add up to less; the results of
    the other rows are 0."""
    return _with_zeros(_product(rows_MI, weights_EIO, sizes_E), sizes_E, padded)


def _forward(rows: Any, weights: Any, sizes: Any, padded: bool) -> tuple[jax.Array, Any]:
    """Keeps the rows only for weights that are trained."""
    kept = rows.value if weights.perturbed else None
    out = grouped_product(rows.value, weights.value, sizes.value, padded)
    return out, (kept, weights.value, sizes.value)


def _backward(padded: bool, kept: Any, gradient_MO: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
    rows_MI, weights_EIO, sizes_E = kept
    of_weights = None if rows_MI is None else _outer_products(rows_MI, gradient_MO, sizes_E)
    of_rows = _product(gradient_MO, weights_EIO.swapaxes(1, 2), sizes_E)
    return _with_zeros(of_rows, sizes_E, padded), of_weights, None


grouped_product.defvjp(_forward, _backward, symbolic_zeros=True)


def _with_zeros(out_MO: jax.Array, sizes_E: jax.Array, padded: bool) -> jax.Array:
    return jnp.where(jnp.arange(len(out_MO))[:, None] < sizes_E.sum(), out_MO, 0) if padded else out_MO


@custom_vmap
def _product(rows_MI: jax.Array, weights_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return _ragged_dot(rows_MI, weights_EIO, sizes_E)


def _ragged_dot(rows_MI: jax.Array, weights_EIO: jax.Array, sizes_E: jax.Array) -> jax.Array:
    tiles = tiles_of(len(rows_MI), *weights_EIO.shape)
    if tiles is None:
        return jax.lax.ragged_dot(rows_MI, weights_EIO, sizes_E)
    with set_xla_metadata(ragged_dot_tiling=",".join(map(str, tiles))):
        return jax.lax.ragged_dot(rows_MI, weights_EIO, sizes_E)


def tiles_of(num_rows: int, num_groups: int, num_inputs: int, num_outputs: int) -> tuple[int, int, int] | None:
    """Rows, inputs and outputs of a tile of the TPU's kernel. By itself the compiler takes 128 rows, and often tiles of
    outputs that end after the last output. With all inputs in a tile, a matrix is read only once. None: as the compiler
    likes.

    >>> tiles_of(20480, 16, 2048, 1536)
    (256, 2048, 768)
    """
    rows = next((rows for rows in ROW_TILES if TILES_PER_GROUP * rows * num_groups <= num_rows), ROW_TILES[-1])
    if num_rows % rows:
        return None
    for num_tiles in range(1, 9):
        outputs = -(-num_outputs // num_tiles // LANES) * LANES
        # Two buffers for each operand and the result, and the sums in float32.
        if 4 * (rows * num_inputs + num_inputs * outputs) + 8 * rows * outputs <= TILE_BYTES:
            return rows, num_inputs, outputs
    return None


@_product.def_vmap
def _products_of_lanes(
    num_lanes: int, is_mapped: list[bool], rows: jax.Array, weights: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, bool]:
    rows_KMI, sizes_KE = _of_lanes(num_lanes, rows, is_mapped[0]), _of_lanes(num_lanes, sizes, is_mapped[2])
    all_rows = rows_KMI.reshape(-1, rows.shape[-1])
    if is_mapped[1]:
        sizes_KE = _with_all_rows(sizes_KE, rows_KMI.shape[1])
        out = _ragged_dot(all_rows, weights.reshape(-1, *weights.shape[2:]), sizes_KE.reshape(-1))
    else:
        order = _order_by_group(sizes_KE, rows_KMI.shape[1])
        sorted_out = _ragged_dot(all_rows[order], weights, sizes_KE.sum(0))
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
    sizes_KE = _with_all_rows(sizes_KE, rows_KMI.shape[1])
    all_rows, all_gradients = (array.reshape(-1, array.shape[-1]) for array in (rows_KMI, gradient_KMO))
    out = jax.lax.ragged_dot_general(all_rows, all_gradients, sizes_KE.reshape(-1), _OUTER)
    return out.reshape(*sizes_KE.shape, *out.shape[1:]), True


def _of_lanes(num_lanes: int, array: jax.Array, is_mapped: bool) -> jax.Array:
    return array if is_mapped else jnp.broadcast_to(array, (num_lanes, *array.shape))


def _with_all_rows(sizes_KE: jax.Array, num_rows: int) -> jax.Array:
    """The last group of each lane also has the rows that are left over, so that the next lane begins after them. Their
    gradients are 0."""
    return sizes_KE.at[:, -1].add(num_rows - sizes_KE.sum(1))


def _order_by_group(sizes_KE: jax.Array, num_rows: int) -> jax.Array:
    """The order [K * M] that sorts the rows of all lanes by group."""
    ends_KE = jnp.cumsum(sizes_KE, axis=1)
    group_of = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(num_rows), side="right"))
    return jnp.argsort(group_of(ends_KE).reshape(-1), stable=True)
