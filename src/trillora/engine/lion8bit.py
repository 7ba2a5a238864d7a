"""Lion with its momentum in one byte a number.

The momentum is kept block by block: 256 numbers as int8 beside one float32, the largest magnitude among them. A step
reads it back, does what Lion does in float32, and rounds to the nearest of 255 equal steps. Blocks lie within one
matrix, so layers stacked for a scan keep the very numbers they would have alone.

A change below half a step is lost, and noise in the gradients is what carries small ones across. On parabolas with as
much noise as slope 2 % of the signs differ from Lion's and the final loss by 0.5 %; without noise it learns far less
than Lion does (`tests/test_optim.py` has the figures). Not yet measured on a language model.

Shapes: [..., N, K], the dims before the last two of the parameter kept, N blocks of K numbers, the last one padded.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

Tree = Any
BLOCK_SIZE = 256
LARGEST = 127  # of int8; -128 stays unused, so that the code is symmetric
SMALLEST_SCALE = 1e-36  # 127 over less is past float32: such a block counts as all zeros


class Lion8bitState(NamedTuple):
    """Two trees like the parameters'."""

    codes: Tree  # int8 [..., N, K]
    scales: Tree  # float32 [..., N]: largest magnitude of each block


def scale_by_lion_8bit(b1: float = 0.9, b2: float = 0.99) -> optax.GradientTransformation:
    """As `optax.scale_by_lion`, with a quarter of its memory."""

    def init(params: Tree) -> Lion8bitState:
        def codes(param: jax.Array) -> jax.Array:
            return jnp.zeros(blocked_shape(param.shape), jnp.int8)

        def scales(param: jax.Array) -> jax.Array:
            return jnp.zeros(blocked_shape(param.shape)[:-1], jnp.float32)

        return Lion8bitState(jax.tree.map(codes, params), jax.tree.map(scales, params))

    def update(gradients: Tree, state: Lion8bitState, params: Tree = None) -> tuple[Tree, Lion8bitState]:
        momentum = jax.tree.map(dequantise, state.codes, state.scales, gradients)
        direction = jax.tree.map(lambda g, m: jnp.sign((1 - b1) * g + b1 * m), gradients, momentum)
        momentum = jax.tree.map(lambda g, m: (1 - b2) * g + b2 * m, gradients, momentum)
        scales = jax.tree.map(block_scales, momentum)
        return direction, Lion8bitState(jax.tree.map(quantise, momentum, scales), scales)

    return optax.GradientTransformation(init, update)


def blocked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., N, K] for a parameter of this shape; a matrix smaller than a block is one block of its own size."""
    size = math.prod(shape[-2:])
    block = max(min(size, BLOCK_SIZE), 1)
    return (*shape[:-2], -(-size // block), block)


def block_scales(array: jax.Array) -> jax.Array:
    largest = jnp.abs(_in_blocks(array)).max(-1)
    return jnp.where(largest < SMALLEST_SCALE, 0.0, largest)


def quantise(array: jax.Array, scales: jax.Array) -> jax.Array:
    per_unit = LARGEST / jnp.where(scales == 0, jnp.inf, scales)
    return jnp.round(_in_blocks(array) * per_unit[..., None]).astype(jnp.int8)


def dequantise(codes: jax.Array, scales: jax.Array, like: jax.Array) -> jax.Array:
    """float32 in the shape of `like`."""
    values = codes.astype(jnp.float32) * (scales * (1 / LARGEST))[..., None]
    size = math.prod(like.shape[-2:])
    return values.reshape(*like.shape[:-2], -1)[..., :size].reshape(like.shape)


def _in_blocks(array: jax.Array) -> jax.Array:
    shape = blocked_shape(array.shape)
    flat = array.astype(jnp.float32).reshape(*shape[:-2], -1)
    padding = math.prod(shape[-2:]) - flat.shape[-1]
    return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, padding)]).reshape(shape)
