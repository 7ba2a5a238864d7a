"""Lion with its momentum in one byte a number.

The momentum is kept block by block, as in 8-bit optimisers by Dettmers et al. (2022): 256 numbers as int8 beside one
float32, the largest magnitude among them. A step reads it back, does what Lion does in float32, and rounds. Blocks lie
within one matrix, so layers stacked for a scan keep the very numbers they would have alone.

The code is a square root: c stands for c²/127² of its block's largest, with its sign. A step of it is 1.6 % of the
largest at the top and 0.006 % next to zero, where Lion's signs are decided. Rounding goes up or down by dice, with the
chance that keeps the mean: what is read back is less than one step of the code from what was written, and right on
average. Rounding to nearest would be half as far off, but always the same way: a momentum moves by a hundredth of its
gradient, and a change below half a step would be forgotten each time anew. The dice are a hash of the number of updates
and the place in the matrix, so a run is the same bit for bit when it is repeated or resumed, and on any mesh.

Its distance from Lion in float32: `tests/test_optim.py` has the table. On parabolas the final loss is 2 % above Lion's
without noise in the gradients and 0.3 % with as much noise as slope; on a tiny language model 0.6 % of signs differ.

Shapes: [..., N, K], the dims before the last two of the parameter kept, N blocks of K numbers, the last one padded.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trillora.engine.hash_random import element_index, scramble, uniform

Tree = Any
BLOCK_SIZE = 256
LARGEST = 127  # of int8; -128 stays unused, so that the code is symmetric
SQUARE = LARGEST**2
SMALLEST_SCALE = 1e-33  # far below it a step of the code is no float32: such a block counts as all zeros


class Lion8bitState(NamedTuple):
    """Two trees like the parameters', and what the dice need to fall otherwise each time."""

    num_updates: jax.Array  # int32
    codes: Tree  # int8 [..., N, K]
    scales: Tree  # float32 [..., N]: largest magnitude of each block


def scale_by_lion_8bit(b1: float = 0.9, b2: float = 0.99) -> optax.GradientTransformation:
    """As `optax.scale_by_lion`, with a quarter of its memory."""

    def init(params: Tree) -> Lion8bitState:
        def codes(param: jax.Array) -> jax.Array:
            return jnp.zeros(blocked_shape(param.shape), jnp.int8)

        def scales(param: jax.Array) -> jax.Array:
            return jnp.zeros(blocked_shape(param.shape)[:-1], jnp.float32)

        return Lion8bitState(jnp.int32(0), jax.tree.map(codes, params), jax.tree.map(scales, params))

    def update(gradients: Tree, state: Lion8bitState, params: Tree = None) -> tuple[Tree, Lion8bitState]:
        momentum = jax.tree.map(dequantise, state.codes, state.scales, gradients)
        direction = jax.tree.map(lambda g, m: jnp.sign((1 - b1) * g + b1 * m), gradients, momentum)
        momentum = jax.tree.map(lambda g, m: (1 - b2) * g + b2 * m, gradients, momentum)
        scales = jax.tree.map(block_scales, momentum)
        codes = jax.tree.map(lambda m, s: quantise(m, s, state.num_updates), momentum, scales)
        return direction, Lion8bitState(state.num_updates + 1, codes, scales)

    return optax.GradientTransformation(init, update)


def blocked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., N, K] for a parameter of this shape; a matrix smaller than a block is one block of its own size."""
    size = math.prod(shape[-2:])
    block = max(min(size, BLOCK_SIZE), 1)
    return (*shape[:-2], -(-size // block), block)


def block_scales(array: jax.Array) -> jax.Array:
    largest = jnp.abs(_in_blocks(array)).max(-1)
    return jnp.where(largest < SMALLEST_SCALE, 0.0, largest)


def quantise(array: jax.Array, scales: jax.Array, count: jax.Array) -> jax.Array:
    """Codes of the array's blocks; `count` makes the dice of one update differ from those of another."""
    blocks = _in_blocks(array)
    squares = jnp.abs(blocks) * (SQUARE / jnp.where(scales == 0, jnp.inf, scales))[..., None]  # 0 to 127²
    # Where a chip's root or quotient is not exact, `part` leaves 0 to 1 by as little and the nearer code is taken.
    below = jnp.minimum(jnp.floor(jnp.sqrt(squares)), LARGEST - 1)
    part = (squares - below * below) / (2 * below + 1)  # of the way to the next code's square
    return (jnp.sign(blocks) * (below + (dice(blocks.shape, count) < part))).astype(jnp.int8)


def dequantise(codes: jax.Array, scales: jax.Array, like: jax.Array) -> jax.Array:
    """float32 in the shape of `like`."""
    numbers = codes.astype(jnp.float32)
    values = numbers * jnp.abs(numbers) * (scales * (1 / SQUARE))[..., None]
    size = math.prod(like.shape[-2:])
    return values.reshape(*like.shape[:-2], -1)[..., :size].reshape(like.shape)


def dice(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """Even in [0, 1), for blocks [..., N, K]: a function of `count` and of the place in N x K alone. Matrices share
    them, each update has its own."""
    return uniform(scramble(element_index(shape, 2) ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))))


def _in_blocks(array: jax.Array) -> jax.Array:
    shape = blocked_shape(array.shape)
    flat = array.astype(jnp.float32).reshape(*shape[:-2], -1)
    padding = math.prod(shape[-2:]) - flat.shape[-1]
    return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, padding)]).reshape(shape)
