"""The middle of a gated MLP with three adapters on an NVIDIA GPU: one Pallas kernel for Triton each way.

    y = down(act(gate(x)) * up(x))        gate, up and down are frozen linear layers with LoRA

cuBLAS computes the wide matmuls with the base. Everything between them is elementwise or of low rank, and takes as
long as reading and writing the wide arrays. XLA passes over them about once per operation; here they are read once:

    g = g0 + lg bgᵀ      u = u0 + lu buᵀ      h = act(g) * u      ld = h adᵀ

    forward    reads g0, u0           writes h and ld
    backward   reads g0, u0 and dh    writes dg and du, and the gradients of bg, bu and ad

g0 and u0 are what the base gives, lg and lu what the A matrices of gate and up give, bg and bu their B matrices times
the scale, ad the A matrix of down. Only g0 and u0 are kept for the backward pass, not g, u or h. Sums are in float32,
and so are g and u, which are never in memory.

A sum over rows or columns is computed in parts, by programs that do not wait for each other, and XLA adds the parts:
the order is fixed, so the results are the same every time. The gradients of lg and lu are sums over all columns, and
the parts would take as much memory as dg and du do: cuBLAS computes them from those.

`MlpForm(kernel="xla")` is the same arithmetic in plain jax, the reference for the kernels.

Legend: M rows, F inner width, R rank, Q = 2 R.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from trillora.engine.kernels.triton_call import IN_JAX, LARGEST, LOG2_E, Functions, call, functions, masked_store
from trillora.engine.types import Pytree

Activation = Literal["silu", "gelu", "gelu_tanh"]
RANKS = (16, 32, 64)  # the kernels' ranks: Triton's matmuls need 16, and more than 64 need too many registers
NARROWEST = 16  # columns of a block in Triton's matmuls; the inner width is a multiple of it


@dataclass(frozen=True)
class MlpBlocks:
    """Rows and columns of a block, and how Triton computes them. The defaults were the fastest of about fifty on an
    H200, in both directions. In a step, between matmuls that take all its power, others win than by themselves."""

    rows: int = 32
    columns: int = 64
    num_warps: int = 2
    num_stages: int = 3
    programs: int = 1024  # at least, if there are enough blocks: several for each processor of a large GPU


class MlpForm(NamedTuple):
    """How the middle is computed."""

    activation: Activation
    kernel: Literal["xla", "triton"] = "triton"
    interpret: bool = False  # run the kernels in the Pallas interpreter
    blocks: MlpBlocks = MlpBlocks()


class Middle(NamedTuple):
    """What the middle is computed from."""

    g0_MF: jax.Array
    u0_MF: jax.Array
    low_MQ: jax.Array  # lg and lu side by side
    bg_FR: jax.Array  # times the scale
    bu_FR: jax.Array
    ad_RF: jax.Array


def padded_rank(*ranks: int) -> int | None:
    """The rank of the kernels for these ranks, which are padded with zeros; None if one is too large."""
    return next((rank for rank in RANKS if rank >= max(ranks)), None)


def is_supported(num_rows: int, width: int, dtype: DTypeLike, *, interpret: bool = False) -> bool:
    """Whether the kernels can compute this shape. Their matmuls in float32 would be slow; the interpreter has any."""
    fits = width % NARROWEST == 0 and num_rows * width < LARGEST
    return fits and (interpret or jnp.dtype(dtype) == jnp.bfloat16)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def middle(given: Middle, form: MlpForm) -> tuple[jax.Array, jax.Array]:
    """h [M, F] and ld [M, R]."""
    if form.kernel == "xla":
        return _reference(given, form.activation)
    return _forward_call(given, form)


def _forward(given: Middle, form: MlpForm) -> tuple[tuple[jax.Array, jax.Array], Middle]:
    return middle(given, form), given


def _backward(form: MlpForm, given: Middle, gradients: tuple[jax.Array, jax.Array]) -> tuple[Middle]:
    if form.kernel == "xla":
        _, pull = jax.vjp(functools.partial(_reference, activation=form.activation), given)
        found: tuple[Middle] = pull(gradients)
        return found
    return (_backward_call(given, *gradients, form),)


middle.defvjp(_forward, _backward)


def _reference(given: Middle, activation: Activation) -> tuple[jax.Array, jax.Array]:
    """In plain jax, with the kernels' types."""
    wide, dtype = jnp.float32, given.g0_MF.dtype
    lg, lu = jnp.split(given.low_MQ, 2, axis=1)
    g = given.g0_MF.astype(wide) + jnp.dot(lg, given.bg_FR.T, preferred_element_type=wide)
    u = given.u0_MF.astype(wide) + jnp.dot(lu, given.bu_FR.T, preferred_element_type=wide)
    h = (ACTIVATIONS[activation](g, IN_JAX)[0] * u).astype(dtype)
    return h, jnp.dot(h, given.ad_RF.T, preferred_element_type=wide).astype(dtype)


# ---- activations: the value and the derivative, in float32


def _silu(g: jax.Array, functions: Functions) -> tuple[jax.Array, jax.Array]:
    gate = functions.sigmoid(g)
    return g * gate, gate * (1 + g * (1 - gate))


def _gelu(g: jax.Array, functions: Functions) -> tuple[jax.Array, jax.Array]:
    """Pallas for Triton has no error function: formula 7.1.26 of Abramowitz and Stegun, to 1.5e-7."""
    density = functions.exp2(-0.5 * LOG2_E * g * g)
    t = functions.reciprocal(1 + 0.3275911 * math.sqrt(0.5) * jnp.abs(g))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    below = 0.5 * tail * density
    share = jnp.where(g < 0, below, 1 - below)
    return g * share, share + g * density * (1 / math.sqrt(2 * math.pi))


def _gelu_tanh(g: jax.Array, functions: Functions) -> tuple[jax.Array, jax.Array]:
    """0.5 (1 + tanh(z)) is the sigmoid of 2 z."""
    slope, cubic = 2 * math.sqrt(2 / math.pi), 0.044715
    share = functions.sigmoid(slope * (g + cubic * g * g * g))
    return g * share, share + g * share * (1 - share) * slope * (1 + 3 * cubic * g * g)


ACTIVATIONS: dict[Activation, Callable[[jax.Array, Functions], tuple[jax.Array, jax.Array]]] = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}


def _activation(form: MlpForm) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
    compute, given = ACTIVATIONS[form.activation], functions(interpret=form.interpret)
    return lambda g: compute(g, given)


# ---- calls


@functools.partial(jax.jit, static_argnames="form")
def _forward_call(given: Middle, form: MlpForm) -> tuple[jax.Array, jax.Array]:
    (num_rows, width), (rank, _) = given.g0_MF.shape, given.ad_RF.shape
    blocks = form.blocks
    block_f = math.gcd(width, blocks.columns)
    num_tiles, num_columns = -(-num_rows // blocks.rows), width // block_f
    # The fewest parts of equal size that give enough programs.
    enough = (n for n in range(1, num_columns) if num_columns % n == 0 and n * num_tiles >= blocks.programs)
    parts = next(enough, num_columns)
    kernel = functools.partial(
        _forward_kernel, act=_activation(form), shape=(blocks.rows, block_f), steps=num_columns // parts
    )
    dtype = given.g0_MF.dtype
    h, ld = _call(
        kernel,
        (_shape((num_rows, width), dtype), _shape((parts, num_rows, rank), jnp.float32)),
        (num_tiles, parts),
        blocks,
        form.interpret,
        "gated_mlp",
    )(*given)
    return h, ld.sum(axis=0).astype(dtype)


@functools.partial(jax.jit, static_argnames="form")
def _backward_call(given: Middle, dh_MF: jax.Array, dld_MR: jax.Array, form: MlpForm) -> Middle:
    (num_rows, width), (rank, _) = given.g0_MF.shape, given.ad_RF.shape
    blocks = form.blocks
    block_f = math.gcd(width, blocks.columns)
    num_tiles, num_columns = -(-num_rows // blocks.rows), width // block_f
    needed = min(num_tiles, -(-blocks.programs // num_columns))
    parts = next((n for n in range(needed, 2 * needed) if num_tiles % n == 0), needed)
    steps = -(-num_tiles // parts)
    parts = -(-num_tiles // steps)
    kernel = functools.partial(_backward_kernel, act=_activation(form), shape=(blocks.rows, block_f), steps=steps)
    dtype, wide = given.g0_MF.dtype, _shape((num_rows, width), given.g0_MF.dtype)
    of_weights = _shape((parts, width, rank), jnp.float32)
    dg, du, *sums = _call(
        kernel,
        (wide, wide, of_weights, of_weights, of_weights),
        (num_columns, parts),
        blocks,
        form.interpret,
        "gated_mlp_gradient",
    )(*given, dh_MF, dld_MR)
    dbg, dbu, dad = (array.sum(axis=0).astype(dtype) for array in sums)
    return Middle(dg, du, jnp.concatenate([dg @ given.bg_FR, du @ given.bu_FR], axis=1), dbg, dbu, dad.T)


def _shape(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _call(
    kernel: Callable[..., None], out: Pytree, grid: tuple[int, ...], blocks: MlpBlocks, interpret: bool, name: str
) -> Callable[..., Pytree]:
    return call(
        kernel,
        out,
        grid,
        name=name,
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        interpret=interpret,
    )


# ---- kernels


class _Rows:
    """A tile of rows; each program has `steps` of them. The last ones may be beyond the last row, in part or whole."""

    def __init__(self, tile: jax.Array, size: int, num_rows: int, steps: int = 1) -> None:
        self.is_whole = num_rows % (size * steps) == 0
        self.wanted = tile * size + jnp.arange(size, dtype=jnp.int32)
        self.slice = pl.ds(tile * size, size)
        self.index = self.slice if self.is_whole else jnp.minimum(self.wanted, num_rows - 1)
        self.is_used = self.wanted < num_rows

    def read(self, ref: jax.Ref, columns: slice | pl.Slice) -> jax.Array:
        value: jax.Array = ref[self.index, columns]
        return value

    def read_or_zero(self, ref: jax.Ref, columns: slice | pl.Slice) -> jax.Array:
        value = self.read(ref, columns)
        return value if self.is_whole else jnp.where(self.is_used[:, None], value, jnp.zeros_like(value))

    def write(self, ref: jax.Ref, at: tuple[jax.Array, ...], columns: slice | pl.Slice, value: jax.Array) -> None:
        mask = None if self.is_whole else jnp.broadcast_to(self.is_used[:, None], value.shape)
        masked_store(ref.at[(*at, self.slice, columns)], value, mask)


def _forward_kernel(
    g_ref: jax.Ref,
    u_ref: jax.Ref,
    low_ref: jax.Ref,
    bg_ref: jax.Ref,
    bu_ref: jax.Ref,
    ad_ref: jax.Ref,
    h_ref: jax.Ref,
    ld_ref: jax.Ref,
    *,
    act: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    shape: tuple[int, int],
    steps: int,
) -> None:
    """A tile of rows, and `steps` blocks of columns one after the other."""
    (block_m, block_f), rank = shape, ad_ref.shape[0]
    rows, part = _Rows(pl.program_id(0), block_m, g_ref.shape[0]), pl.program_id(1)
    lg, lu = rows.read(low_ref, pl.ds(0, rank)), rows.read(low_ref, pl.ds(rank, rank))

    def step(i: jax.Array, ld: jax.Array) -> jax.Array:
        columns = pl.ds((part * steps + i) * block_f, block_f)
        g = rows.read(g_ref, columns).astype(jnp.float32) + _dot(lg, bg_ref[columns, :].T)
        u = rows.read(u_ref, columns).astype(jnp.float32) + _dot(lu, bu_ref[columns, :].T)
        h = (act(g)[0] * u).astype(h_ref.dtype)
        rows.write(h_ref, (), columns, h)
        return ld + _dot(h, ad_ref[:, columns].T)

    ld = jax.lax.fori_loop(0, steps, step, jnp.zeros((block_m, rank), jnp.float32))
    rows.write(ld_ref, (part,), pl.ds(0, rank), ld)


def _backward_kernel(
    g_ref: jax.Ref,
    u_ref: jax.Ref,
    low_ref: jax.Ref,
    bg_ref: jax.Ref,
    bu_ref: jax.Ref,
    ad_ref: jax.Ref,
    dh_ref: jax.Ref,
    dld_ref: jax.Ref,
    dg_ref: jax.Ref,
    du_ref: jax.Ref,
    dbg_ref: jax.Ref,
    dbu_ref: jax.Ref,
    dad_ref: jax.Ref,
    *,
    act: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
    shape: tuple[int, int],
    steps: int,
) -> None:
    """A block of columns, and `steps` tiles of rows one after the other. A tile beyond the last row repeats that row
    with inputs of low rank that are zero, so it adds nothing, and it writes nothing."""
    (block_m, block_f), rank, num_rows = shape, ad_ref.shape[0], g_ref.shape[0]
    column, part = pl.program_id(0), pl.program_id(1)
    columns, first, second = pl.ds(column * block_f, block_f), pl.ds(0, rank), pl.ds(rank, rank)
    bg, bu, ad, dtype = bg_ref[columns, :], bu_ref[columns, :], ad_ref[:, columns], dg_ref.dtype

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rows = _Rows(part * steps + i, block_m, num_rows, steps)
        lg, lu = rows.read_or_zero(low_ref, first), rows.read_or_zero(low_ref, second)
        dld = rows.read_or_zero(dld_ref, first)
        g = rows.read(g_ref, columns).astype(jnp.float32) + _dot(lg, bg.T)
        u = rows.read(u_ref, columns).astype(jnp.float32) + _dot(lu, bu.T)
        dh = rows.read(dh_ref, columns).astype(jnp.float32) + _dot(dld, ad)
        value, slope = act(g)
        h = (value * u).astype(dtype)
        dg, du = (dh * u * slope).astype(dtype), (dh * value).astype(dtype)
        rows.write(dg_ref, (), columns, dg)
        rows.write(du_ref, (), columns, du)
        dbg, dbu, dad = sums
        return dbg + _dot(dg.T, lg), dbu + _dot(du.T, lu), dad + _dot(h.T, dld)

    zeros = jnp.zeros((block_f, rank), jnp.float32)
    sums = jax.lax.fori_loop(0, steps, step, (zeros, zeros, zeros))
    for ref, total in zip((dbg_ref, dbu_ref, dad_ref), sums, strict=True):
        ref[part, columns, :] = total


def _dot(left: jax.Array, right: jax.Array) -> jax.Array:
    return jnp.dot(left, right, preferred_element_type=jnp.float32)
