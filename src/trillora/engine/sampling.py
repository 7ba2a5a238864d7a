"""From logits to tokens: sampling one token, and the loop that decodes several.

Every sequence has its own random key, made from the seed and the sequence's number. So its tokens do not depend on the
other sequences of the batch or on padding.

Example: logits with probabilities [0.5, 0.3, 0.15, 0.05] and top_p = 0.7. Token 0 alone has 0.5 < 0.7, tokens 0 and 1
together reach 0.8: the draw is between these two, with probabilities 0.625 and 0.375.

Legend: B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trillora.engine.types import Pytree


class Sampling(NamedTuple):
    """Arguments of the compiled program, not constants: a new temperature does not recompile."""

    temperature: jax.Array | float = 0.0  # 0: greedy, always the most likely token
    top_p: jax.Array | float = 1.0  # draw from the fewest most likely tokens whose probabilities sum to this
    top_k: jax.Array | int = 0  # draw from at most this many of the most likely tokens; 0: all
    seed: jax.Array | int = 0


GREEDY = Sampling()


class DecodeState(NamedTuple):
    """Sequences being generated. `token_B` is sampled but not yet fed to the model."""

    cache: Pytree
    token_B: jax.Array
    slot: jax.Array  # the cache slot for token_B
    starts_B: jax.Array  # the first slot of each sequence that is not padding
    rows_B: jax.Array  # each sequence's number, for its random key
    num_written: jax.Array
    done_B: jax.Array


Forward = Callable[[Pytree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Pytree]]  # cache, tokens, slot, starts


def choose(logits_BV: jax.Array, keys_B: jax.Array, sampling: Sampling) -> jax.Array:
    """The next token of every sequence."""
    logits = logits_BV.astype(jnp.float32)
    return jax.lax.cond(
        jnp.asarray(sampling.temperature) > 0,
        lambda: jax.vmap(lambda row, key: _draw(row, key, sampling))(logits, keys_B),
        lambda: jnp.argmax(logits, axis=-1).astype(jnp.int32),
    )


def choose_each(logits_BV: jax.Array, keys_B: jax.Array, sampling_B: Sampling) -> jax.Array:
    """The next token of every sequence, by a rule for each of them: the fields of `sampling_B` are arrays [B]."""
    logits = logits_BV.astype(jnp.float32)
    most_likely = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    draws = jnp.asarray(sampling_B.temperature) > 0
    return jax.lax.cond(
        draws.any(),
        lambda: jnp.where(draws, jax.vmap(_draw)(logits, keys_B, sampling_B), most_likely),
        lambda: most_likely,
    )


def _draw(logits_V: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    order = jnp.argsort(-logits_V)  # most likely first; the sort is stable, so ties keep the order of the vocabulary
    ranked = logits_V[order] / jnp.maximum(sampling.temperature, 1e-6)
    rank = jnp.arange(len(ranked))
    ranked = jnp.where((rank < sampling.top_k) | (jnp.asarray(sampling.top_k) <= 0), ranked, -jnp.inf)
    shares = jax.nn.softmax(ranked)
    before = jnp.cumsum(shares) - shares
    ranked = jnp.where((before < sampling.top_p) | (rank == 0), ranked, -jnp.inf)
    return order[jax.random.categorical(key, ranked)].astype(jnp.int32)


def begin(
    logits_BV: jax.Array,
    cache: Pytree,
    num_read: jax.Array | int,
    starts_B: jax.Array,
    rows_B: jax.Array,
    sampling: Sampling,
    stops: jax.Array,
) -> DecodeState:
    """Samples the first token after prompts that fill `num_read` slots."""
    token = choose(logits_BV, token_keys(sampling.seed, rows_B, 0), sampling)
    done = jnp.isin(token, stops)
    return DecodeState(cache, token, jnp.int32(num_read), starts_B, rows_B, jnp.int32(1), done)


def write_on(
    forward: Forward,
    state: DecodeState,
    limit: jax.Array,
    sampling: Sampling,
    stops: jax.Array,
    most: int,
    padding: int,
) -> tuple[DecodeState, jax.Array]:
    """Decodes up to `limit` more tokens into an array [B, most] and stops early when all sequences have ended. The
    rest of the array is padding."""
    out = jnp.full((len(state.token_B), most), padding, jnp.int32)

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

    def unfinished(carry: tuple[jax.Array, DecodeState, jax.Array]) -> jax.Array:
        i, w, _ = carry
        return (i < jnp.minimum(limit, most)) & ~w.done_B.all()

    _, state, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), state, out))
    return state, out


def token_keys(seed: jax.Array | int, rows_B: jax.Array, number: jax.Array | int) -> jax.Array:
    """A random key for one token of every sequence."""
    key = jax.random.key(seed)
    return jax.vmap(lambda row: jax.random.fold_in(jax.random.fold_in(key, row), number))(rows_B)
