"""A cheap random number generator: each number is a hash of its index, about a dozen integer operations where jax's
own generator needs about a hundred.

It draws dropout masks and stochastic rounding, millions of numbers per step. The numbers do not depend on the mesh or
on the order of computation, so a run can be repeated and resumed bit for bit. Not for cryptography.

    >>> key = jax.random.key(0)
    >>> keep_mask(MaskKey(key, jnp.arange(4)), 0.5, (4, 6)).astype(int)  # the whole batch of 4 sequences
    [[1 1 1 1 1 0]
     [0 0 0 1 1 0]
     [0 0 1 1 1 1]
     [1 0 0 0 1 0]]
    >>> keep_mask(MaskKey(key, jnp.array([1, 3])), 0.5, (2, 6)).astype(int)  # a micro-batch with sequences 1 and 3
    [[0 0 0 1 1 0]
     [1 0 0 0 1 0]]
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class MaskKey(NamedTuple):
    """What dropout masks are drawn from: the step's random key, and which sequences of the batch are computed.

    Each sequence has its own mask, chosen by its index in the whole batch. So the masks do not depend on how the batch
    is split into micro-batches or over devices.
    """

    key: jax.Array
    index_B: jax.Array  # int32: each sequence's index in the whole batch

    def fold_in(self, number: jax.Array | int) -> MaskKey:
        """The key of one layer or one adapter."""
        return MaskKey(jax.random.fold_in(self.key, number), self.index_B)


def scramble(bits: jax.Array, between: jax.Array | int = 0) -> jax.Array:
    """A bijective hash of uint32: two rounds of multiply and shift. The constants are those with the lowest bias in
    C. Wellons' search (2018). `between` is mixed in after the first round."""
    for factor, mixed_in in ((0x7FEB352D, between), (0x846CA68B, 0)):
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
        bits ^= (bits >> 15) ^ jnp.uint32(mixed_in)
    return bits ^ (bits >> 16)


def uniform(bits: jax.Array) -> jax.Array:
    """uint32 to float32, uniform in [0, 1)."""
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def element_index(shape: tuple[int, ...], num_dims: int, start: jax.Array | int = 0) -> jax.Array:
    """The flat index of each element within the last `num_dims` dims, plus `start`, as uint32 (modulo 2**32).

    The sum begins with `start`. If `start` changes in a loop, XLA cannot move the array out of the loop and keep it in
    memory.
    """
    numbers = jnp.uint32(start)
    for dim in range(len(shape) - num_dims, len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        along = jnp.arange(shape[dim], dtype=jnp.uint32) * jnp.uint32(stride)
        numbers = numbers + along.reshape(-1, *(1,) * (len(shape) - 1 - dim))
    return jnp.broadcast_to(numbers, shape)


def keep_mask(key: MaskKey, keep: float, shape: tuple[int, ...]) -> jax.Array:
    """True with probability `keep`; each element depends on the key, its sequence and its index in the sequence.

    The first dim is the B sequences, or B * n with n slices of each, as in a model that flattens [B, T, D] to
    [B * T, D]. Any other array is shared by all sequences and gets one mask.
    """
    first, second = jax.random.key_data(key.key)[-2:]
    # Two keys may differ in a single bit: spread it over all bits of both words. The same for two sequences, whose
    # second words must differ too: their ranges of indices overlap modulo 2**32.
    second = scramble(second ^ scramble(first + jnp.uint32(1)))
    first = scramble(first ^ second)
    index = key.index_B if shape[0] % len(key.index_B) == 0 else jnp.zeros(1, jnp.int32)
    first_B = scramble(first + index.astype(jnp.uint32))
    second_B = scramble(first_B ^ second)
    by_sequence = (len(index), shape[0] // len(index), *shape[1:])
    start, between = (words.reshape(-1, *(1,) * len(shape)) for words in (first_B, second_B))
    numbers = scramble(element_index(by_sequence, len(shape), start), between)
    return (uniform(numbers) < keep).reshape(shape)
