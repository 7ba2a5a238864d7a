"""Products of rows with the matrix of their group, also under `jax.vmap`.

    rows [5, I], weights [3, I, O], sizes [2, 0, 3]     rows 0 and 1 times matrix 0, rows 2 to 4 times matrix 2: [5, O]

| kernel | where | why |
|---|---|---|
| `xla` | anywhere | `jax.lax.ragged_dot` |
| `megablox` | TPUs | also reads matrices [O, I]. XLA would need a copy of all weights, for the backward pass |
| `triton` | large NVIDIA GPUs | `grouped_kernels`. XLA would multiply all rows with the matrices of all groups |

jax cannot map the matmul over lanes that share the weights. Here the rows of all lanes are then sorted by group, so
that one matmul has all rows of a group. Weights that differ by lane become more groups.

Legend: M rows, E groups, I inputs, O outputs, R rank, K lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import CustomVJPPrimal
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

from trillora.engine.kernels.triton_call import has_triton
from trillora.engine.mixture import grouped_kernels

Kernel = Literal["xla", "megablox", "triton"]
Kept = tuple[jax.Array | None, jax.Array, jax.Array]  # rows, if the weights are trained; weights, sizes
LARGE_SHARED_MEMORY = ("8.0", "9.0", "10.0", "10.3")  # compute capability of A100, H100 and H200, B200, B300
LANES = 128  # a TPU's arrays are tiles of 8 x 128
ROW_TILES = (256, 128)
TILES_PER_GROUP = 4  # of 256 rows, at least, on average: a tile in which a group ends is computed twice
TILE_BYTES = 12 * 2**20  # of the 16 MiB that a kernel may use
TILES_NAME = "grouped_product_tiles"  # in the name of the kernel's operation, with its tiles, for preflight

_OUTER = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@dataclass(frozen=True)
class GroupedForm:
    """How a matmul is computed."""

    outputs_first: bool = False  # weights are [E, O, I]
    padded: float = 1.0  # M, in multiples of what the sizes add up to on average. The results of more rows than they
    # add up to are undefined: zeros, or whatever was in memory
    kernel: Kernel = "xla"
    interpret: bool = False  # run the kernel in the Pallas interpreter

    def turned(self) -> GroupedForm:
        """With the weights in the other order."""
        return replace(self, outputs_first=not self.outputs_first)


def kernel_for(device: Any) -> Kernel:
    """The fastest on a device. Blocks of the Triton kernels need the shared memory of a data center's GPU."""
    if device.platform == "tpu":
        return "megablox"
    is_large = getattr(device, "compute_capability", None) in LARGE_SHARED_MEMORY
    return "triton" if is_large and has_triton() else "xla"


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(
    rows_MI: jax.Array,
    weights: jax.Array,
    sizes_E: jax.Array,
    form: GroupedForm = GroupedForm(),  # noqa: B008
) -> jax.Array:
    """[M, O]. Rows are sorted by group. Weights are [E, I, O]."""
    product: jax.Array = _product(form)(rows_MI, weights, sizes_E)
    return product


def _forward(
    rows: CustomVJPPrimal, weights: CustomVJPPrimal, sizes: CustomVJPPrimal, form: GroupedForm
) -> tuple[jax.Array, Kept]:
    """Keeps the rows only for weights that are trained."""
    kept = rows.value if weights.perturbed else None
    out = grouped_product(rows.value, weights.value, sizes.value, form)
    return out, (kept, weights.value, sizes.value)


def _backward(form: GroupedForm, kept: Kept, gradient_MO: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
    rows_MI, weights, sizes_E = kept
    of_weights = None
    if rows_MI is not None:
        both = (gradient_MO, rows_MI) if form.outputs_first else (rows_MI, gradient_MO)
        of_weights = _outer_products(form)(*both, sizes_E)
    of_rows = _product(form.turned())(gradient_MO, weights, sizes_E)
    return of_rows, of_weights, None


grouped_product.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def adapted_product(
    rows_MI: jax.Array, weights: jax.Array, a_ERI: jax.Array, b_ERO: jax.Array, sizes_E: jax.Array, form: GroupedForm
) -> jax.Array:
    """[M, O]: the matmul with frozen weights, plus that with A and B of the row's group."""
    return _forward_of_adapted(rows_MI, weights, a_ERI, b_ERO, sizes_E, form)[0]


def _forward_of_adapted(
    rows_MI: jax.Array, weights: jax.Array, a_ERI: jax.Array, b_ERO: jax.Array, sizes_E: jax.Array, form: GroupedForm
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    inner_MR = _product(replace(form, outputs_first=True))(rows_MI, a_ERI, sizes_E)
    out = _sum_of_products(form)(rows_MI, weights, inner_MR, b_ERO, sizes_E)
    return out, (rows_MI, weights, inner_MR, a_ERI, b_ERO, sizes_E)


def _backward_of_adapted(
    form: GroupedForm, kept: tuple[jax.Array, ...], gradient_MO: jax.Array
) -> tuple[jax.Array, None, jax.Array, jax.Array, None]:
    rows_MI, weights, inner_MR, a_ERI, b_ERO, sizes_E = kept
    of_inner_MR = _product(replace(form, outputs_first=True))(gradient_MO, b_ERO, sizes_E)
    of_rows = _sum_of_products(form.turned())(gradient_MO, weights, of_inner_MR, a_ERI, sizes_E)
    outer = _outer_products(form)
    return of_rows, None, outer(of_inner_MR, rows_MI, sizes_E), outer(inner_MR, gradient_MO, sizes_E), None


adapted_product.defvjp(_forward_of_adapted, _backward_of_adapted)


@functools.cache
def _product(form: GroupedForm) -> Callable[..., jax.Array]:
    """The matmul in this form, which `jax.vmap` can map."""

    def product(rows_MI: jax.Array, weights: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return _of_one_lane(rows_MI, weights, sizes_E, form)

    mapped = custom_vmap(product)
    mapped.def_vmap(functools.partial(_of_lanes_together, product))
    return mapped


@functools.cache
def _sum_of_products(form: GroupedForm) -> Callable[..., jax.Array]:
    """Rows times weights plus inner rows times matrices [E, R, O]. One kernel for both, if there is one."""
    product, thin = _product(form), _product(replace(form, outputs_first=False))

    @custom_vmap
    def both(
        rows_MI: jax.Array, weights: jax.Array, inner_MR: jax.Array, low_ERO: jax.Array, sizes_E: jax.Array
    ) -> jax.Array:
        low_rank = (inner_MR, low_ERO)
        if form.kernel == "triton" and grouped_kernels.is_supported(rows_MI, weights, *low_rank):
            return grouped_kernels.product(rows_MI, weights, sizes_E, low_rank, transposed=form.outputs_first)
        return product(rows_MI, weights, sizes_E) + thin(*low_rank, sizes_E)

    @both.def_vmap
    def of_lanes(num_lanes: int, is_mapped: list[bool], *given: jax.Array) -> tuple[jax.Array, bool]:
        rows, inner = (_of_lanes(num_lanes, given[i], is_mapped[i]) for i in (0, 2))
        dims = [0 if mapped else None for mapped in is_mapped]
        base = jax.vmap(product, (0, dims[1], dims[4]))(rows, given[1], given[4])
        return base + jax.vmap(thin, (0, dims[3], dims[4]))(inner, given[3], given[4]), True

    return both


def _of_one_lane(rows_MI: jax.Array, weights: jax.Array, sizes_E: jax.Array, form: GroupedForm) -> jax.Array:
    if form.kernel == "triton" and grouped_kernels.is_supported(rows_MI, weights):
        return grouped_kernels.product(rows_MI, weights, sizes_E, transposed=form.outputs_first)
    num_outputs = weights.shape[1 if form.outputs_first else 2]
    is_megablox = form.kernel == "megablox"
    tiles = tiles_of(len(rows_MI), len(weights), rows_MI.shape[1], num_outputs) if is_megablox else None
    if tiles is None:
        return jax.lax.ragged_dot(rows_MI, weights.swapaxes(1, 2) if form.outputs_first else weights, sizes_E)
    row_tiles = round(len(rows_MI) / form.padded / tiles[0])  # the kernel skips tiles without rows
    with jax.named_scope(f"{TILES_NAME}_{'_'.join(map(str, (*tiles, row_tiles)))}_end"):
        return gmm(
            rows_MI,
            weights,
            sizes_E,
            preferred_element_type=rows_MI.dtype,
            tiling=tiles,
            transpose_rhs=form.outputs_first,
            interpret=form.interpret,
        )


def tiles_of(num_rows: int, num_groups: int, num_inputs: int, num_outputs: int) -> tuple[int, int, int] | None:
    """Rows, inputs and outputs of a tile of the TPU's kernel; None if it is not suitable. If a tile has all inputs, a
    matrix is read only once.

    >>> tiles_of(20480, 16, 2048, 1536)
    (256, 2048, 768)
    """
    rows = next((rows for rows in ROW_TILES if TILES_PER_GROUP * rows * num_groups <= num_rows), ROW_TILES[-1])
    if num_rows % rows or min(num_inputs, num_outputs) < LANES:
        return None
    whole = [number for number in range(1, 5) if number == 1 or num_inputs % (number * LANES) == 0]
    for inputs in (num_inputs // number for number in whole):
        for number in range(1, 9):
            outputs = num_outputs if number == 1 else -(-num_outputs // number // LANES) * LANES
            # Two buffers for each operand and the result, and the sums in float32.
            if 4 * (rows * inputs + inputs * outputs) + 8 * rows * outputs <= TILE_BYTES:
                return rows, inputs, outputs
    return None


def _of_lanes_together(
    product: Callable[..., jax.Array],
    num_lanes: int,
    is_mapped: list[bool],
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
) -> tuple[jax.Array, bool]:
    rows_KMI, sizes_KE = _of_lanes(num_lanes, rows, is_mapped[0]), _of_lanes(num_lanes, sizes, is_mapped[2])
    all_rows = rows_KMI.reshape(-1, rows.shape[-1])
    if is_mapped[1]:
        sizes_KE = _with_all_rows(sizes_KE, rows_KMI.shape[1])
        out = product(all_rows, weights.reshape(-1, *weights.shape[2:]), sizes_KE.reshape(-1))
    else:
        order = _order_by_group(sizes_KE, rows_KMI.shape[1])
        sorted_out = product(all_rows[order], weights, sizes_KE.sum(0))
        out = jnp.zeros_like(sorted_out).at[order].set(sorted_out, unique_indices=True)
    return out.reshape(*rows_KMI.shape[:2], -1), True


@functools.cache
def _outer_products(form: GroupedForm) -> Callable[..., jax.Array]:
    """The sum of the outer products of each group's rows [E, I, O]."""

    @custom_vmap
    def outer(left_MI: jax.Array, right_MO: jax.Array, sizes_E: jax.Array) -> jax.Array:
        if form.kernel == "triton" and grouped_kernels.is_supported(left_MI, right_MO):
            return grouped_kernels.outer_products(left_MI, right_MO, sizes_E)
        return jax.lax.ragged_dot_general(left_MI, right_MO, sizes_E, _OUTER)

    @outer.def_vmap
    def of_lanes(num_lanes: int, is_mapped: list[bool], *given: jax.Array) -> tuple[jax.Array, bool]:
        each = zip(given, is_mapped, strict=True)
        left_KMI, right_KMO, sizes_KE = (_of_lanes(num_lanes, array, mapped) for array, mapped in each)
        sizes_KE = _with_all_rows(sizes_KE, left_KMI.shape[1])
        all_left, all_right = (array.reshape(-1, array.shape[-1]) for array in (left_KMI, right_KMO))
        out = outer(all_left, all_right, sizes_KE.reshape(-1))
        return out.reshape(*sizes_KE.shape, *out.shape[1:]), True

    return outer


def _of_lanes(num_lanes: int, array: jax.Array, is_mapped: bool) -> jax.Array:
    return array if is_mapped else jnp.broadcast_to(array, (num_lanes, *array.shape))


def _with_all_rows(sizes_KE: jax.Array, num_rows: int) -> jax.Array:
    """The last group of each lane also has the rows that are left over, so that the next lane begins after them."""
    return sizes_KE.at[:, -1].add(num_rows - sizes_KE.sum(1))


def _order_by_group(sizes_KE: jax.Array, num_rows: int) -> jax.Array:
    """The order [K * M] that sorts the rows of all lanes by group."""
    ends_KE = jnp.cumsum(sizes_KE, axis=1)
    group_of = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(num_rows), side="right"))
    return jnp.argsort(group_of(ends_KE).reshape(-1), stable=True)
