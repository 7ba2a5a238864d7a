"""RMSNorm on an NVIDIA GPU: one Pallas kernel for Triton each way.

    y = x / sqrt(mean(x²) + eps) * (weight + offset)        offset is 1 in Gemma, whose weights are stored minus one

XLA needs three passes over x for the result and two or three for the gradient; the kernels read x once each way. A row
is in registers, so the backward pass computes its mean again instead of reading it. All arithmetic is in float32, and
the result is rounded once.

    >>> y, x = rms_norm(jnp.array([[3.0, 4.0]]), jnp.ones(2), Norm(eps=0.0, kernel="xla"))
    >>> y
    Array([[0.8485281, 1.1313709]], dtype=float32)

x comes out as it went in. A transformer adds it to the result of the block that follows the norm. If that addition uses
the x that came out, the kernel for the gradient gets both gradients of x, and adds them without a pass of its own.

Legend: M rows, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.experimental import pallas as pl

from trillora.engine.kernels.triton_call import LARGEST, call, masked_load, masked_store

WIDEST = 16384  # a row is in the registers of one block of threads
NUMBERS = 4096  # of a tile, at least one row


class Norm(NamedTuple):
    eps: float
    offset: float = 0.0
    kernel: Literal["xla", "triton"] = "triton"
    interpret: bool = False  # run the kernels in the Pallas interpreter
    numbers: int = NUMBERS
    num_warps: int = 4


def is_supported(x: jax.Array) -> bool:
    return x.shape[-1] <= WIDEST and x.size < LARGEST and x.dtype in (jnp.bfloat16, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, weight_D: jax.Array, norm: Norm) -> tuple[jax.Array, jax.Array]:
    """The norm of the last dimension of x, and x."""
    if norm.kernel == "xla":
        return _reference(x, weight_D, norm), x
    return _call(_forward_kernel, "rms_norm", norm, weight_D, x), x


def _forward(
    x: CustomVJPPrimal, weight_D: CustomVJPPrimal, norm: Norm
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """jax says of each argument whether it has a gradient, which is not used here."""
    return rms_norm(x.value, weight_D.value, norm), (x.value, weight_D.value)


def _backward(
    norm: Norm, saved: tuple[jax.Array, jax.Array], gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, weight_D), (dy, of_x) = saved, gradients
    if isinstance(dy, SymbolicZero):
        dy = jnp.zeros_like(x)
    others = () if isinstance(of_x, SymbolicZero) else (of_x,)
    _, pull = jax.vjp(functools.partial(_reference, norm=norm), x, weight_D)
    dx, dweight = pull(dy)  # XLA leaves out what is not used: with the kernels dx, and the weight's if it is frozen
    if norm.kernel == "triton":
        return _call(_backward_kernel, "rms_norm_gradient", norm, weight_D, x, dy, *others), dweight
    return sum(others, start=dx), dweight


rms_norm.defvjp(_forward, _backward, symbolic_zeros=True)


def _reference(x: jax.Array, weight_D: jax.Array, norm: Norm) -> jax.Array:
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + norm.eps)
    return (wide * inverse * (weight_D.astype(jnp.float32) + norm.offset)).astype(x.dtype)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _call(kernel: Callable[..., None], name: str, norm: Norm, weight_D: jax.Array, *arrays: jax.Array) -> jax.Array:
    """One result with the shape of the arrays, which is also x's shape."""
    x, width = arrays[0], arrays[0].shape[-1]
    padded = pl.next_power_of_2(width)
    tile = max(norm.numbers // padded, 1)
    rows = [array.reshape(-1, width) for array in arrays]
    num_rows = len(rows[0])
    body = functools.partial(kernel, norm=norm, tile=(tile, padded), size=(num_rows, width))
    shape = jax.ShapeDtypeStruct(rows[0].shape, x.dtype)
    grid = (pl.cdiv(num_rows, tile),)
    num_warps = max(norm.num_warps, padded // 1024)  # no more than 32 numbers of a row for each thread
    y = call(body, shape, grid, name=name, num_warps=num_warps, interpret=norm.interpret)(weight_D, *rows)
    found: jax.Array = y.reshape(x.shape)
    return found


class _Tile:
    """Some rows of the arrays, in float32."""

    def __init__(self, tile: tuple[int, int], size: tuple[int, int]) -> None:
        first = pl.program_id(0) * tile[0]
        self.slice = (pl.ds(first, tile[0]), pl.ds(0, tile[1]))
        self.is_column = jnp.arange(tile[1], dtype=jnp.int32) < size[1]
        is_row = first + jnp.arange(tile[0], dtype=jnp.int32) < size[0]
        self.mask = None
        if size[0] % tile[0] or size[1] != tile[1]:
            self.mask = is_row[:, None] & self.is_column[None, :]
        self.width = size[1]

    def read(self, ref: jax.Ref) -> jax.Array:
        value: jax.Array = masked_load(ref.at[self.slice], self.mask) if self.mask is not None else ref[self.slice]
        return value.astype(jnp.float32)

    def weight(self, ref: jax.Ref, norm: Norm) -> jax.Array:
        return masked_load(ref.at[self.slice[1]], self.is_column).astype(jnp.float32)[None, :] + norm.offset

    def mean(self, numbers: jax.Array) -> jax.Array:
        return numbers.sum(axis=1, keepdims=True) / self.width

    def write(self, ref: jax.Ref, value: jax.Array) -> None:
        masked_store(ref.at[self.slice], value, self.mask)


def _forward_kernel(
    w_ref: jax.Ref, x_ref: jax.Ref, y_ref: jax.Ref, *, norm: Norm, tile: tuple[int, int], size: tuple[int, int]
) -> None:
    rows = _Tile(tile, size)
    x = rows.read(x_ref)
    rows.write(y_ref, x * jax.lax.rsqrt(rows.mean(x * x) + norm.eps) * rows.weight(w_ref, norm))


def _backward_kernel(
    w_ref: jax.Ref,
    x_ref: jax.Ref,
    dy_ref: jax.Ref,
    *refs: jax.Ref,
    norm: Norm,
    tile: tuple[int, int],
    size: tuple[int, int],
) -> None:
    *other_refs, dx_ref = refs
    rows = _Tile(tile, size)
    x, g = rows.read(x_ref), rows.read(dy_ref) * rows.weight(w_ref, norm)
    inverse = jax.lax.rsqrt(rows.mean(x * x) + norm.eps)
    dx = inverse * (g - x * (inverse * inverse * rows.mean(g * x)))
    rows.write(dx_ref, sum((rows.read(ref) for ref in other_refs), start=dx))
