"""Random numbers that are a hash of their place: a dozen integer operations each, where jax's own generator takes a
hundred. The same on any mesh and in any order, so a run repeats and resumes bit for bit.

For dropout masks and for rounding by chance, where millions are thrown every step; not for anything that must not be
guessed.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


def scramble(bits: jax.Array, between: jax.Array | int = 0) -> jax.Array:
    """uint32 to uint32: two rounds of multiply and shift, with the constants of C. Wellons' search for the least biased
    (2018); `between` is mixed in after the first."""
    for factor, mixed_in in ((0x7FEB352D, between), (0x846CA68B, 0)):
        bits = (bits ^ (bits >> 16)) * jnp.uint32(factor)
        bits ^= (bits >> 15) ^ jnp.uint32(mixed_in)
    return bits ^ (bits >> 16)


def share(bits: jax.Array) -> jax.Array:
    """uint32 as float32, even in [0, 1)."""
    return (bits >> 8).astype(jnp.float32) * 2.0**-24


def places(shape: tuple[int, ...], num_dims: int, start: jax.Array | int = 0) -> jax.Array:
    """Each element's number among those of the last `num_dims` dims, counted from `start`; past 2**32 they begin anew.

    They are built up from `start`: in a loop where it changes, nothing as large as the array can be moved before the
    loop and held there.
    """
    numbers = jnp.uint32(start)
    for dim in range(len(shape) - num_dims, len(shape)):
        stride = math.prod(shape[dim + 1 :]) % 2**32
        along = jnp.arange(shape[dim], dtype=jnp.uint32) * jnp.uint32(stride)
        numbers = numbers + along.reshape(-1, *(1,) * (len(shape) - 1 - dim))
    return jnp.broadcast_to(numbers, shape)


def keep_mask(key: jax.Array, keep: float, shape: tuple[int, ...]) -> jax.Array:
    """True with the chance `keep`, by the key and the place."""
    first, second = jax.random.key_data(key)[-2:]
    # Keys may differ in a single bit: it has to reach every bit of both words first.
    second = scramble(second ^ scramble(first + jnp.uint32(1)))
    first = scramble(first ^ second)
    return share(scramble(places(shape, len(shape), first), second)) < keep
