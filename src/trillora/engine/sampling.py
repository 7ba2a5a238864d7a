"""From logits to tokens: how the next one is chosen, and the loop that writes several.

Every row draws from a key of its own, so what it says depends on the seed and its number, not on its neighbours or on
how prompts were padded. Legend: B rows, V vocabulary, N tokens written by one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """Numbers, not structure: another temperature is not another program."""

    temperature: jax.Array | float = 0.0  # 0: always the likeliest token
    top_p: jax.Array | float = 1.0  # the likeliest tokens that together have this probability
    top_k: jax.Array | int = 0  # at most this many of the likeliest; 0: all
    seed: jax.Array | int = 0


GREEDY = Sampling()


class DecodeState(NamedTuple):
    """Rows being written. `token_B` is chosen but not yet read by the model."""

    cache: Any
    token_B: jax.Array
    slot: jax.Array  # where token_B will be kept
    starts_B: jax.Array
    rows_B: jax.Array  # each row's number, for its random numbers
    num_written: jax.Array
    done_B: jax.Array


Forward = Callable[[Any, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]  # cache, tokens, slot, starts


def choose(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of every row."""
    logits = logits_BV.astype(jnp.float32)
    return jax.lax.cond(
        jnp.asarray(sampling.temperature) > 0,
        lambda: jax.vmap(lambda row, key: _draw(row, key, sampling))(logits, keys_B),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )


def _draw(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    order = jnp.argsort(-logits_V)  # likeliest first; equal ones by their number, which argsort keeps
    ranked = logits_V[order] / jnp.maximum(sampling.temperature, 1e-6)
    rank = jnp.arange(len(ranked))
    ranked = jnp.where((rank < sampling.top_k) | (jnp.asarray(sampling.top_k) <= 0), ranked, -jnp.inf)
    shares = jax.nn.softmax(ranked)
    before = jnp.cumsum(shares) - shares
    ranked = jnp.where((before < sampling.top_p) | (rank == 0), ranked, -jnp.inf)
    return order[jax.random.categorical(key, ranked)].astype(jnp.int32)


def begin(
    logits_BV: jax.Array,
    cache: Any,
    num_read: int,
    starts_B: jax.Array,
    rows_B: jax.Array,
    sampling: Sampling,
    stops: jax.Array,
) -> DecodeState:
    """The first token after prompts that fill `num_read` slots."""
    token = choose(logits_BV, token_keys(sampling.seed, rows_B, 0), sampling)
    done = jnp.isin(token, stops)
    return DecodeState(cache, token, jnp.int32(num_read), starts_B, rows_B, jnp.int32(1), done)


def write_on(
    forward: Forward,
    writing: DecodeState,
    limit: jax.Array,
    sampling: Sampling,
    stops: jax.Array,
    most: int,
    padding: int,
) -> tuple[DecodeState, jax.Array]:
    """Up to `limit` more tokens [B, most], fewer where every row has stopped; rows that have are padded."""
    out = jnp.full((len(writing.token_B), most), padding, jnp.int32)

    def step(carry: tuple[jax.Array, DecodeState, jax.Array]) -> tuple[jax.Array, DecodeState, jax.Array]:
        i, w, out = carry
        logits, cache = forward(w.cache, w.token_B, w.slot, w.starts_B)
        chosen = choose(logits, token_keys(sampling.seed, w.rows_B, w.num_written), sampling)
        token = jnp.where(w.done_B, padding, chosen)
        done = w.done_B | jnp.isin(token, stops)
        out = jax.lax.dynamic_update_slice_in_dim(out, token[:, None], i, axis=1)
        return (
            i + 1,
            w._replace(cache=cache, token_B=token, slot=w.slot + 1, num_written=w.num_written + 1, done_B=done),
            out,
        )

    def goes_on(carry: tuple[jax.Array, DecodeState, jax.Array]) -> jax.Array:
        i, w, _ = carry
        return (i < jnp.minimum(limit, most)) & ~w.done_B.all()

    _, writing, out = jax.lax.while_loop(goes_on, step, (jnp.int32(0), writing, out))
    return writing, out


def token_keys(seed: jax.Array | int, rows_B: jax.Array, number: jax.Array | int) -> jax.Array:
    """A random key for one token of every row."""
    key = jax.random.key(seed)
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), number))(rows_B)
