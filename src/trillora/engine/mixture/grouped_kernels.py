"""Grouped matmuls on NVIDIA GPUs, as Pallas kernels for Triton.

XLA has no grouped matmul for GPUs: it multiplies all rows with the matrices of all groups and masks the result. Here
the rows of a group are cut into tiles, and a tile has one group:

    sizes [130, 0, 200], tiles of 128 rows      group [0, 0, 2, 2], start [0, 128, 130, 258], end [128, 130, 258, 330]

The last tile of a group also computes rows of the next one, and does not write them. A matmul with wide matrices can
add one of low rank to its accumulator, so that an adapter needs no other pass over the wide result. Both functions are
programs of their own, so that all layers share what is traced and compiled.

Legend: M rows, E groups, I inputs, O outputs, R rank, T tiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from trillora.engine.kernels.triton_call import call, masked_store


@dataclass(frozen=True)
class GroupedBlocks:
    """Rows, outputs and inputs of a block, and how Triton computes it."""

    rows: int = 128
    outputs: int = 128
    inputs: int = 64
    num_warps: int = 8
    num_stages: int = 4


# Fastest in single timings on an H200 (benchmarks/RESULTS.md, "Grouped products"): forward with an adapter, by A, and
# outer products.
WIDE = GroupedBlocks(outputs=256, num_stages=3)
THIN = GroupedBlocks(rows=32, inputs=256, num_warps=4, num_stages=3)
OUTER = GroupedBlocks(rows=32, outputs=256, inputs=64, num_warps=4)
SMALLEST = 16  # of a block in Triton's matmul; blocks are powers of two
MAX_THIN = 64  # columns up to this number are padded to the next block


def is_supported(*arrays: jax.Array) -> bool:
    """Whether the columns of all arrays can be cut into blocks. float32 needs too much shared memory."""
    widths = (size for array in arrays for size in array.shape[1:])
    return all(array.dtype.itemsize == 2 for array in arrays) and all(
        width <= MAX_THIN or width % SMALLEST == 0 for width in widths
    )


@functools.partial(jax.jit, static_argnames=("transposed", "blocks", "interpret"))
def product(
    rows_MI: jax.Array,
    weights: jax.Array,
    sizes_E: jax.Array,
    low_rank: tuple[jax.Array, ...] = (),
    *,
    transposed: bool = False,
    blocks: GroupedBlocks | None = None,
    interpret: bool = False,
) -> jax.Array:
    """[M, O]: rows times the weights [E, I, O] of their group, or [E, O, I] if `transposed`. Rows after the last group
    give zeros. `low_rank` is inner rows [M, R] and matrices [E, R, O], whose matmul is added."""
    num_rows, num_outputs = rows_MI.shape[0], weights.shape[1 if transposed else 2]
    rows_MI, weights = _padded(rows_MI, 1), _padded(weights, 1, 2)
    padded_inputs, padded_outputs = rows_MI.shape[1], weights.shape[1 if transposed else 2]
    if low_rank:
        low_rank = (_padded(low_rank[0], 1), _padded(low_rank[1], 1, 2))
    blocks = blocks or (THIN if padded_outputs <= MAX_THIN else WIDE)
    block_o, block_i = _divisor(padded_outputs, blocks.outputs), _divisor(padded_inputs, blocks.inputs)
    tiles, num_tiles = _tiles(sizes_E, num_rows, blocks.rows)
    kernel = functools.partial(
        _product_kernel,
        shape=(blocks.rows, block_i, block_o),
        num_blocks=(padded_inputs // block_i, padded_outputs // block_o),
        transposed=transposed,
    )
    out: jax.Array = _call(
        kernel, (num_rows, padded_outputs), rows_MI.dtype, (num_tiles * (padded_outputs // block_o),), blocks, interpret
    )(*tiles, rows_MI, weights, *low_rank)
    return out[:, :num_outputs]


@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def outer_products(
    left_MI: jax.Array,
    right_MO: jax.Array,
    sizes_E: jax.Array,
    *,
    blocks: GroupedBlocks = OUTER,
    interpret: bool = False,
) -> jax.Array:
    """[E, I, O]: the sum of the outer products of each group's rows."""
    num_inputs, num_outputs, num_groups = left_MI.shape[1], right_MO.shape[1], sizes_E.shape[0]
    left_MI, right_MO = _padded(left_MI, 1), _padded(right_MO, 1)
    shape = (num_groups, left_MI.shape[1], right_MO.shape[1])
    block_i, block_o = _divisor(shape[1], blocks.inputs), _divisor(shape[2], blocks.outputs)
    ends_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    kernel = functools.partial(_outer_kernel, shape=(blocks.rows, block_i, block_o))
    grid = (shape[2] // block_o, shape[1] // block_i, num_groups)
    call = _call(kernel, shape, left_MI.dtype, grid, blocks, interpret)
    out: jax.Array = call(ends_E - sizes_E.astype(jnp.int32), ends_E, left_MI, right_MO)
    return out[:, :num_inputs, :num_outputs]


def _call(
    kernel: functools.partial[None],
    shape: tuple[int, ...],
    dtype: DTypeLike,
    grid: tuple[int, ...],
    blocks: GroupedBlocks,
    interpret: bool,
) -> Callable[..., jax.Array]:
    out = jax.ShapeDtypeStruct(shape, dtype)
    return call(
        kernel,
        out,
        grid,
        name=kernel.func.__name__.strip("_"),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )


def _padded(array: jax.Array, *dims: int) -> jax.Array:
    """Thin dims with zeros up to a block: rank 8 becomes 16."""
    widths = [(0, 0)] * array.ndim
    for d in dims:
        size = array.shape[d]
        if size <= MAX_THIN:
            widths[d] = (0, max(SMALLEST, 1 << (size - 1).bit_length()) - size)
    return jnp.pad(array, widths) if any(after for _, after in widths) else array


def _divisor(size: int, at_most: int) -> int:
    """The largest power of two that divides the size."""
    return min(size & -size, at_most)


def _tiles(sizes_E: jax.Array, num_rows: int, tile: int) -> tuple[tuple[jax.Array, ...], int]:
    """Group, first row and end of each tile, and their static number. Rows after the last group are group E. Unused
    tiles are empty."""
    num_groups = sizes_E.shape[0] + 1
    num_tiles = -(-num_rows // tile) + num_groups - 1
    sizes = sizes_E.astype(jnp.int32)
    sizes = jnp.append(sizes, num_rows - sizes.sum())
    ends, num_of_group = jnp.cumsum(sizes), -(-sizes // tile)
    tile_ends = jnp.cumsum(num_of_group)
    number_T = jnp.arange(num_tiles, dtype=jnp.int32)
    group_T = jnp.searchsorted(tile_ends, number_T, side="right").astype(jnp.int32)
    is_used_T = group_T < num_groups
    group_T = jnp.minimum(group_T, num_groups - 1)
    start_T = (ends - sizes)[group_T] + (number_T - (tile_ends - num_of_group)[group_T]) * tile
    end_T = jnp.where(is_used_T, jnp.minimum(start_T + tile, ends[group_T]), start_T)
    return (group_T, start_T, end_T), num_tiles


def _product_kernel(
    group_ref: jax.Ref,
    start_ref: jax.Ref,
    end_ref: jax.Ref,
    rows_ref: jax.Ref,
    weights_ref: jax.Ref,
    *refs: jax.Ref,
    shape: tuple[int, int, int],
    num_blocks: tuple[int, int],
    transposed: bool,
) -> None:
    """One tile of rows times one block of columns. Columns change fastest, so that neighbors share rows."""

    *low_rank, out_ref = refs
    tile, column = pl.program_id(0) // num_blocks[1], pl.program_id(0) % num_blocks[1]
    start, end = start_ref[tile], end_ref[tile]
    has_group = group_ref[tile] < weights_ref.shape[0]
    group = jnp.minimum(group_ref[tile], weights_ref.shape[0] - 1)
    block_m, block_i, block_o = shape
    columns = pl.ds(column * block_o, block_o)
    wanted = start + jnp.arange(block_m, dtype=jnp.int32)
    index = jnp.minimum(wanted, rows_ref.shape[0] - 1)

    @pl.when(start < end)
    def _() -> None:
        def add(i: jax.Array, total: jax.Array) -> jax.Array:
            inputs = pl.ds(i * block_i, block_i)
            weights = weights_ref[group, columns, inputs].T if transposed else weights_ref[group, inputs, columns]
            return total + _dot(rows_ref[index, inputs], weights)

        total = jax.lax.fori_loop(0, num_blocks[0], add, jnp.zeros((block_m, block_o), jnp.float32))
        if low_rank:
            inner_ref, low_ref = low_rank
            block_r = _divisor(inner_ref.shape[1], MAX_THIN)
            for first in range(0, inner_ref.shape[1], block_r):
                ranks = pl.ds(first, block_r)
                total += _dot(inner_ref[index, ranks], low_ref[group, ranks, columns])
        total = jnp.where(has_group, total, jnp.zeros_like(total))
        mask = jnp.broadcast_to((wanted < end)[:, None], total.shape)
        masked_store(out_ref.at[pl.ds(start, block_m), columns], total, mask)


def _outer_kernel(
    start_ref: jax.Ref,
    end_ref: jax.Ref,
    left_ref: jax.Ref,
    right_ref: jax.Ref,
    out_ref: jax.Ref,
    *,
    shape: tuple[int, int, int],
) -> None:
    """A block of one group's matrix: a loop over the rows of the group."""
    group = pl.program_id(2)
    start, end = start_ref[group], end_ref[group]
    block_m, block_i, block_o = shape
    inputs, columns = pl.ds(pl.program_id(1) * block_i, block_i), pl.ds(pl.program_id(0) * block_o, block_o)

    def add(i: jax.Array, total: jax.Array) -> jax.Array:
        wanted = start + i * block_m + jnp.arange(block_m, dtype=jnp.int32)
        index = jnp.minimum(wanted, left_ref.shape[0] - 1)
        left, right = left_ref[index, inputs], right_ref[index, columns]
        return total + _dot(jnp.where((wanted < end)[:, None], left, jnp.zeros_like(left)).T, right)

    num_steps = (end - start + block_m - 1) // block_m
    total = jax.lax.fori_loop(0, num_steps, add, jnp.zeros((block_i, block_o), jnp.float32))
    out_ref[group, inputs, columns] = total.astype(out_ref.dtype)


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)
