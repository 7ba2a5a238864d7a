"""Lion with its momentum stored in one byte per number.

The momentum is quantized in blocks, as in the 8-bit optimizers of Dettmers et al. (2022): 256 numbers as int8, and one
float32 scale, the largest magnitude in the block. A step dequantizes it, computes Lion in float32 and quantizes again.
A block never spans two matrices, so layers stacked for a scan have the same numbers as separate layers.

Quantization is quadratic: code c means sign(c) * (c / 127)² * scale. With scale 1, code 127 is 1.0, code 126 is 0.984
and code 1 is 0.00006: a step is 1.6 % of the scale at the top and 0.006 % near zero, where Lion's signs are decided.

Rounding is stochastic: up or down, with the probabilities that keep the mean. So the error is below one step of the
code and zero on average. Rounding to nearest would halve the largest error but add a bias: one update moves the
momentum by a hundredth of the gradient, and a change below half a step would be lost every time. The random numbers
are a hash of the update count and the element's index, so a run repeats and resumes bit for bit, on any mesh.

Difference from Lion in float32 (table in `tests/engine/test_optim.py`): on quadratic functions the final loss is 2 %
higher without gradient noise and 0.3 % higher with as much noise as gradient; on a tiny language model 0.6 % of signs
differ.

Shapes: [..., N, K] has the parameter's dims before the last two, then N blocks of K numbers; the last one is padded.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from trillora.engine.hash_random import element_index, scramble, uniform
from trillora.engine.types import Pytree

BLOCK_SIZE = 256
LARGEST = 127  # of int8; -128 stays unused, so that the code is symmetric
SQUARE = LARGEST**2
SMALLEST_SCALE = 1e-33  # for smaller scales a step of the code underflows float32: the block becomes all zeros


class Lion8bitState(NamedTuple):
    """Two trees with the structure of the parameters."""

    num_updates: jax.Array  # int32; each update rounds with other random numbers
    codes: Pytree  # int8 [..., N, K]
    scales: Pytree  # float32 [..., N]: largest magnitude of each block


def scale_by_lion_8bit(b1: float = 0.9, b2: float = 0.99) -> optax.GradientTransformation:
    """`optax.scale_by_lion` with a quarter of its memory."""

    def init(params: Pytree) -> Lion8bitState:
        def codes(param: jax.Array) -> jax.Array:
            return jnp.zeros(blocked_shape(param.shape), jnp.int8)

        def scales(param: jax.Array) -> jax.Array:
            return jnp.zeros(blocked_shape(param.shape)[:-1], jnp.float32)

        return Lion8bitState(jnp.int32(0), jax.tree.map(codes, params), jax.tree.map(scales, params))

    def update(gradients: Pytree, state: Lion8bitState, params: Pytree = None) -> tuple[Pytree, Lion8bitState]:
        momentum = jax.tree.map(dequantise, state.codes, state.scales, gradients)
        direction = jax.tree.map(lambda g, m: jnp.sign((1 - b1) * g + b1 * m), gradients, momentum)
        momentum = jax.tree.map(lambda g, m: (1 - b2) * g + b2 * m, gradients, momentum)
        scales = jax.tree.map(block_scales, momentum)
        codes = jax.tree.map(lambda m, s: quantise(m, s, state.num_updates), momentum, scales)
        return direction, Lion8bitState(state.num_updates + 1, codes, scales)

    return optax.GradientTransformation(init, update)


def blocked_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., N, K] for a parameter of this shape. A matrix smaller than BLOCK_SIZE is one block of its own size."""
    size = math.prod(shape[-2:])
    block = max(min(size, BLOCK_SIZE), 1)
    return (*shape[:-2], -(-size // block), block)


def block_scales(array: jax.Array) -> jax.Array:
    largest = jnp.abs(_in_blocks(array)).max(-1)
    return jnp.where(largest < SMALLEST_SCALE, 0.0, largest)


def quantise(array: jax.Array, scales: jax.Array, count: jax.Array) -> jax.Array:
    """Codes of the array's blocks. `count` is the number of the update: each rounds with its own random numbers."""
    blocks = _in_blocks(array)
    squares = jnp.abs(blocks) * (SQUARE / jnp.where(scales == 0, jnp.inf, scales))[..., None]  # 0 to 127²
    # If a chip's square root or division is inexact, `part` may be slightly outside [0, 1]; the nearer code is taken.
    below = jnp.minimum(jnp.floor(jnp.sqrt(squares)), LARGEST - 1)
    part = (squares - below * below) / (2 * below + 1)  # position between this code's square and the next one's
    return (jnp.sign(blocks) * (below + (rounding_numbers(blocks.shape, count) < part))).astype(jnp.int8)


def dequantise(codes: jax.Array, scales: jax.Array, like: jax.Array) -> jax.Array:
    """The float32 array, in the shape of `like`."""
    numbers = codes.astype(jnp.float32)
    values = numbers * jnp.abs(numbers) * (scales * (1 / SQUARE))[..., None]
    size = math.prod(like.shape[-2:])
    return values.reshape(*like.shape[:-2], -1)[..., :size].reshape(like.shape)


def rounding_numbers(shape: tuple[int, ...], count: jax.Array) -> jax.Array:
    """Uniform in [0, 1), for blocks [..., N, K]: a function of `count` and of the index in N x K. All matrices share
    the numbers of an update."""
    return uniform(scramble(element_index(shape, 2) ^ (count.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))))


def _in_blocks(array: jax.Array) -> jax.Array:
    shape = blocked_shape(array.shape)
    flat = array.astype(jnp.float32).reshape(*shape[:-2], -1)
    padding = math.prod(shape[-2:]) - flat.shape[-1]
    return jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, padding)]).reshape(shape)
