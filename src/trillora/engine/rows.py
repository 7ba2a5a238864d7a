"""Sequences that are decoded together but start and end at different times: the rows of a server's batch.

Every row has its own slot, limit, stop tokens and sampling rule, so a row's tokens do not depend on the other rows:

    row                       0          1          2
    prompt ends at slot       64         128        (free)
    num_written               17         3
    next token goes to slot   81         131

`advance` decodes a few tokens in all rows. A row that is done stays as it is until another sequence takes its place.

Legend: B rows, N tokens of one call, K most likely tokens, S stop tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trillora.engine.sampling import Sampling, choose_each
from trillora.engine.types import Pytree

MOST_STOPS = 8  # stop tokens of a row
MOST_TOP = 20  # most likely tokens whose probabilities are returned
NOTHING = -1  # in place of a token: none was generated


class RowRules(NamedTuple):
    """How each row continues. The fields of `sampling` are arrays [B]."""

    sampling: Sampling
    numbers_B: jax.Array  # which of a request's answers the row is, for its random key
    limits_B: jax.Array  # tokens to generate
    stops_BS: jax.Array  # padded with NOTHING
    wants_top_B: jax.Array  # whether the most likely tokens are asked for
    adapters_B: jax.Array  # the number of the adapter that computes the logits


class RowStates(NamedTuple):
    """`token_B` is sampled but not yet fed to the model."""

    cache: Pytree
    token_B: jax.Array
    slot_B: jax.Array  # the cache slot for token_B
    starts_B: jax.Array  # the first slot that is not padding
    num_written_B: jax.Array
    done_B: jax.Array
    rule: RowRules


class Written(NamedTuple):
    """What one call generated. Rows that were done have NOTHING."""

    tokens_BN: jax.Array
    logprobs_BN: jax.Array  # natural logarithm, before temperature, top_p and top_k
    top_tokens_BNK: jax.Array
    top_logprobs_BNK: jax.Array


Forward = Callable[[Pytree, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Pytree]]  # cache, tokens, slots, starts


def begin_rows(
    logits_BV: jax.Array, cache: Pytree, num_read: jax.Array, starts_B: jax.Array, rule: RowRules
) -> tuple[RowStates, Written]:
    """Samples the first token after prompts that fill `num_read` slots."""
    zeros = jnp.zeros_like(starts_B)
    rows = RowStates(cache, zeros, zeros + (num_read - 1), starts_B, zeros, zeros > 0, rule)
    rows, found = _sampled(logits_BV, cache, rows)
    return rows, Written(*(array[:, None] for array in found))


def advance(
    forward: Forward, rows: RowStates, active_B: jax.Array, num_steps: jax.Array, most: int, num_top: int
) -> tuple[RowStates, Written]:
    """Decodes `num_steps` more tokens, at most `most`, in the rows that are active and not done. Ends early when there
    are none."""
    B, K = len(rows.token_B), num_top
    out = Written(
        jnp.full((B, most), NOTHING, jnp.int32),
        jnp.zeros((B, most), jnp.float32),
        jnp.zeros((B, most, K), jnp.int32),
        jnp.zeros((B, most, K), jnp.float32),
    )

    def step(carry: tuple[jax.Array, RowStates, Written]) -> tuple[jax.Array, RowStates, Written]:
        i, rows, out = carry
        logits, cache = forward(rows.cache, rows.token_B, rows.slot_B, rows.starts_B)
        rows, found = _sampled(logits, cache, rows)
        out = Written(
            *(jax.lax.dynamic_update_slice_in_dim(a, f[:, None], i, 1) for a, f in zip(out, found, strict=True))
        )
        return i + 1, rows, out

    def unfinished(carry: tuple[jax.Array, RowStates, Written]) -> jax.Array:
        i, rows, _ = carry
        return (i < jnp.minimum(num_steps, most)) & ~rows.done_B.all()

    rows = rows._replace(done_B=rows.done_B | ~active_B)
    _, rows, out = jax.lax.while_loop(unfinished, step, (jnp.int32(0), rows, out))
    return rows, out


def _sampled(logits_BV: jax.Array, cache: Pytree, rows: RowStates) -> tuple[RowStates, Written]:
    """One more token in every row that is not done, and what is reported about it (without the axis N)."""
    rule, alive = rows.rule, ~rows.done_B
    keys = jax.vmap(_key)(rule.sampling.seed, rule.numbers_B, rows.num_written_B)
    token = jnp.where(alive, choose_each(logits_BV, keys, rule.sampling), rows.token_B)
    num_written = rows.num_written_B + alive
    ends = (token[:, None] == rule.stops_BS).any(axis=1) | (num_written >= rule.limits_B)
    new = rows._replace(
        cache=cache, token_B=token, slot_B=rows.slot_B + alive, num_written_B=num_written, done_B=rows.done_B | ends
    )
    return new, probabilities(logits_BV.astype(jnp.float32), jnp.where(alive, token, NOTHING), alive & rule.wants_top_B)


def _key(seed: jax.Array | int, number: jax.Array, written: jax.Array) -> jax.Array:
    """The same key as `sampling.token_keys`, so that a row draws what it would draw alone."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), written)


def probabilities(logits_BV: jax.Array, token_B: jax.Array, wants_top_B: jax.Array) -> Written:
    """The tokens with their probabilities, as one step of `Written` (without the axis N). NaN if the numbers of the
    model have overflowed: then a logit is NaN or infinite, or, after a norm that divides by infinity, all are equal."""
    B, V = logits_BV.shape
    K = min(MOST_TOP, V)
    total_B1 = jax.nn.logsumexp(logits_BV, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits_BV, jnp.maximum(token_B, 0)[:, None], axis=1) - total_B1
    chosen = jnp.where(jnp.isposinf(total_B1), jnp.nan, chosen)  # another token's logit may be infinite
    if V > 1:
        all_equal_B1 = logits_BV.min(axis=1, keepdims=True) == logits_BV.max(axis=1, keepdims=True)
        chosen = jnp.where(all_equal_B1, jnp.nan, chosen)

    def most_likely() -> tuple[jax.Array, jax.Array]:
        values, tokens = jax.lax.top_k(logits_BV, K)
        return tokens.astype(jnp.int32), values - total_B1

    def none() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((B, K), jnp.int32), jnp.zeros((B, K), jnp.float32)

    return Written(token_B, chosen[:, 0], *jax.lax.cond(wants_top_B.any(), most_likely, none))
