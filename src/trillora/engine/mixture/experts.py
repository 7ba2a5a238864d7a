"""The weighted sum of each token's experts, with static shapes: on one device, or with the experts spread over devices.

Every (token, expert) pair is a row. Rows are sorted by expert, computed with grouped matmuls, and added to their
token. Example with 3 tokens, 2 experts per token and 4 experts:

    index_NK = [[2, 0], [1, 2], [0, 2]]      experts of each token
    order    = [1, 4, 2, 0, 3, 5]            the six pairs, sorted by expert: experts 0, 0, 1, 2, 2, 2
    token    = [0, 2, 1, 0, 1, 2]            the token of each row
    sizes_E  = [2, 1, 3, 0]                  rows of each expert, for `grouped_product`

Spread over two devices, the first has experts 0 and 1 and the second 2 and 3. Tokens travel, weights do not: each
device gathers the tokens of both and computes the three rows of its own experts. The partial sums are added up on the
device that the token came from. The router decides how many rows a device has, but a program computes a fixed number:

    at first   1.25 times the average. Rows that are left over belong to no expert
    then       a loop over the rows that are still missing, a few at a time. Usually there are none

So no token is ever dropped. A router that sends all tokens to one expert only makes the step slower.

Legend: n tokens of this device, N of all devices that share the experts, K experts per token, E experts, M rows,
D width.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trillora.engine.types import Pytree

FIRST, FURTHER = 1.25, 0.25  # rows of the first pass and of each further pass, in multiples of the average
ROW_BLOCK = 512  # passes have a multiple of this many rows
SAVED_NAME = "small"  # of values that take almost no memory, in remat policies
RARE = "rarely_runs"  # in the names of operations that usually do not run; preflight does not count them

# (rows [M, D], weight of each row [M], rows of each expert [E], weights of the experts) -> weighted results [M, D]. In
# `mix_spread` there may be rows at the end that belong to no expert. Their results may be anything, but their gradients
# must be 0.
Compute = Callable[[jax.Array, jax.Array, jax.Array, Pytree], jax.Array]


class ExpertPairs(NamedTuple):
    """The pairs of the experts that this device has, sorted by expert. Other pairs are behind them."""

    order: jax.Array  # [N * K], and FURTHER rows of padding
    sizes_E: jax.Array


class Tokens(NamedTuple):
    hidden_ND: jax.Array
    gate_NK: jax.Array


def mix(compute: Compute, tokens: Tokens, index_NK: jax.Array, weights: Pytree, num_experts: int) -> jax.Array:
    """[N, D]: for each token, the sum of its experts' results, each multiplied by its gate."""
    rows, num_choices = _sorted_rows(index_NK, 0, num_experts), index_NK.shape[1]
    gate_M = checkpoint_name(tokens.gate_NK.reshape(-1)[rows.order], SAVED_NAME)
    out = compute(_all_rows(tokens.hidden_ND, rows.order, num_choices), gate_M, rows.sizes_E, weights)
    return _summed(out, rows.order, num_choices).astype(tokens.hidden_ND.dtype)


def mix_spread(
    compute: Compute,
    tokens: Tokens,
    index_nK: jax.Array,
    weights: Pytree,
    num_experts: int,
    token_axes: tuple[str, ...],
    copied_axes: tuple[str, ...],
) -> jax.Array:
    """`mix` inside a `shard_map` where each device has some of the experts: `num_experts` counts all of them.

    `token_axes`: mesh axes that experts and tokens are split over. `copied_axes`: those that only experts are split
    over. The device with the index i along these axes, in this order, has the i-th part of the experts."""
    num_shards = jax.lax.axis_size((*token_axes, *copied_axes))
    num_own, num_choices = num_experts // num_shards, index_nK.shape[1]
    first_own = num_own * jax.lax.axis_index((*token_axes, *copied_axes))
    index_NK = _gathered(index_nK, token_axes)
    most = index_NK.shape[0] * min(num_own, num_choices)  # a token has each expert at most once
    first, further = (min(most, _blocks(share * index_NK.size / num_shards)) for share in (FIRST, FURTHER))
    rows = _sorted_rows(index_NK, first_own, num_own, padding=further)

    def one_pass(
        start: jax.Array | int, num_rows: int, arguments: tuple[Tokens, Pytree], rows: ExpertPairs
    ) -> jax.Array:
        local, weights = arguments
        everyone = Tokens(*(_gathered(array, token_axes) for array in local))
        return _returned(_partial_sums(compute, everyone, weights, rows, start, num_rows), token_axes, copied_axes)

    out = one_pass(0, first, (tokens, weights), rows)
    if most > first:
        # Equal on all devices that exchange tokens: they all know which experts were chosen.
        counts = _count(index_NK.reshape(-1), num_experts).reshape(num_shards, num_own).sum(1)
        num_passes = checkpoint_name(-((first - counts.max()) // further), SAVED_NAME)

        def further_pass(number: jax.Array, arguments: tuple[Tokens, Pytree], rows: ExpertPairs) -> jax.Array:
            return one_pass(first + number * further, further, arguments, rows)

        out = out + _sum_of_passes(further_pass, num_passes, (tokens, weights), rows)
    return out.astype(tokens.hidden_ND.dtype)


def _sorted_rows(index_NK: jax.Array, first: jax.Array | int, num_experts: int, padding: int = 0) -> ExpertPairs:
    """The rows of the experts `first`, `first` + 1, …"""
    number = index_NK.reshape(-1) - first
    number = jnp.where((number >= 0) & (number < num_experts), number, num_experts)
    order = jnp.pad(jnp.argsort(number, stable=True), (0, padding))
    return ExpertPairs(checkpoint_name(order, SAVED_NAME), checkpoint_name(_count(number, num_experts), SAVED_NAME))


def _count(number: jax.Array, num_experts: int) -> jax.Array:
    """How often each of the numbers occurs. Compared with all, because TPUs add to computed places one by one."""
    return (number[:, None] == jnp.arange(num_experts)).sum(0, dtype=jnp.int32)


def _blocks(num_rows: float) -> int:
    return math.ceil(num_rows / ROW_BLOCK) * ROW_BLOCK


def _partial_sums(
    compute: Compute, tokens: Tokens, weights: Pytree, rows: ExpertPairs, start: jax.Array | int, num_rows: int
) -> jax.Array:
    """[N, D]: for each token, the sum over its rows that are among `num_rows` rows, beginning with `start`."""
    pair = jax.lax.dynamic_slice_in_dim(rows.order, start, num_rows)
    ends_E = jnp.clip(jnp.cumsum(rows.sizes_E) - start, 0, num_rows)
    sizes_E = jnp.diff(ends_E, prepend=0)
    num_tokens, num_choices = tokens.gate_NK.shape
    # Rows that belong to no expert have a token behind the last one, and weight 0.
    has_expert = jnp.arange(num_rows) < ends_E[-1]
    token_M = jnp.where(has_expert, pair // num_choices, num_tokens)
    gate_M = checkpoint_name(jnp.where(has_expert, tokens.gate_NK.reshape(-1)[pair], 0), SAVED_NAME)
    out = compute(_rows_of(tokens.hidden_ND, token_M, num_tokens), gate_M, sizes_E, weights)
    return _added(out, token_M, num_tokens)


# jax's own gradients of these two would read and write all rows once more, to replace dropped rows by zeros.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _rows_of(array_ND: jax.Array, token_M: jax.Array, num_tokens: int) -> jax.Array:
    """The rows of these tokens; any row for a token behind the last one."""
    return array_ND.at[token_M].get(mode="clip")


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _added(rows_MD: jax.Array, token_M: jax.Array, num_tokens: int) -> jax.Array:
    """For each token the sum of its rows. Rows of a token behind the last one are dropped."""
    return jnp.zeros((num_tokens, rows_MD.shape[1]), rows_MD.dtype).at[token_M].add(rows_MD, mode="drop")


_rows_of.defvjp(
    lambda array_ND, token_M, num_tokens: (_rows_of(array_ND, token_M, num_tokens), token_M),
    lambda num_tokens, token_M, gradient_MD: (_added(gradient_MD, token_M, num_tokens), None),
)
_added.defvjp(
    lambda rows_MD, token_M, num_tokens: (_added(rows_MD, token_M, num_tokens), token_M),
    lambda num_tokens, token_M, gradient_ND: (_rows_of(gradient_ND, token_M, num_tokens), None),
)


# Where all rows are on one device, they are also gathered on the way back: 0.16 instead of 1.1 ms on an H200.


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _all_rows(array_ND: jax.Array, order_M: jax.Array, num_choices: int) -> jax.Array:
    return array_ND[order_M // num_choices]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _summed(rows_MD: jax.Array, order_M: jax.Array, num_choices: int) -> jax.Array:
    """For each token the sum of its rows."""
    return rows_MD[jnp.argsort(order_M)].reshape(-1, num_choices, rows_MD.shape[1]).sum(1)


_all_rows.defvjp(
    lambda array_ND, order_M, num_choices: (_all_rows(array_ND, order_M, num_choices), order_M),
    lambda num_choices, order_M, gradient_MD: (_summed(gradient_MD, order_M, num_choices), None),
)
_summed.defvjp(
    lambda rows_MD, order_M, num_choices: (_summed(rows_MD, order_M, num_choices), order_M),
    lambda num_choices, order_M, gradient_ND: (_all_rows(gradient_ND, order_M, num_choices), None),
)


def _gathered(array: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.all_gather(array, axes, tiled=True) if axes else array


def _returned(sums_ND: jax.Array, token_axes: tuple[str, ...], copied_axes: tuple[str, ...]) -> jax.Array:
    """Adds up the partial sums of all devices. Each gets the sums of its own tokens."""
    if token_axes:
        sums_ND = jax.lax.psum_scatter(sums_ND, token_axes, tiled=True)
    return jax.lax.psum(sums_ND, copied_axes) if copied_axes else sums_ND


# (number of the pass, what may be trained, the rest) -> its result
Pass = Callable[[jax.Array, Pytree, Pytree], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_passes(one_pass: Pass, num_passes: jax.Array, arguments: Pytree, others: Pytree) -> jax.Array:
    """The sum of a number of passes that is known only while the program runs. jax cannot differentiate such a loop."""
    result = jax.eval_shape(one_pass, num_passes, arguments, others)

    return _sum(num_passes, lambda number: one_pass(number, arguments, others), jnp.zeros(result.shape, result.dtype))


def _forward(one_pass: Pass, num_passes: jax.Array, arguments: Pytree, others: Pytree) -> tuple[jax.Array, Pytree]:
    def value(primal: Pytree) -> Pytree:
        return primal.value

    def select(perturbed: bool) -> Pytree:
        return jax.tree.map(lambda primal: primal.value if primal.perturbed == perturbed else None, arguments)

    num_passes, others = jax.tree.map(value, (num_passes, others))
    out = _sum_of_passes(one_pass, num_passes, jax.tree.map(value, arguments), others)
    return out, (num_passes, select(True), select(False), others)


def _backward(one_pass: Pass, kept: Pytree, gradient: jax.Array) -> tuple[None, Pytree, None]:
    """Gradients of what is trained. Every pass is computed again."""
    num_passes, trained, frozen, others = kept

    def result(number: jax.Array, trained: Pytree) -> jax.Array:
        both = jax.tree.map(lambda a, b: b if a is None else a, trained, frozen, is_leaf=lambda x: x is None)
        return one_pass(number, both, others)

    def gradients(number: jax.Array) -> Pytree:
        _, transposed = jax.vjp(functools.partial(result, number), trained)
        return transposed(gradient)[0]

    return None, _sum(num_passes, gradients, jax.tree.map(jnp.zeros_like, trained)), None


_sum_of_passes.defvjp(_forward, _backward, symbolic_zeros=True)


def _sum(num_passes: jax.Array, term: Callable[[jax.Array], Pytree], zeros: Pytree) -> Pytree:
    """The sum of term(0), term(1), … Without the barrier, XLA would move the exchange of tokens that ends a pass behind
    the loop, where it always runs."""

    def add(state: tuple[jax.Array, Pytree]) -> tuple[jax.Array, Pytree]:
        number, total = state
        return number + 1, jax.tree.map(jnp.add, total, jax.lax.optimization_barrier(term(number)))

    with jax.named_scope(RARE):
        return jax.lax.while_loop(lambda state: state[0] < num_passes, add, (jnp.zeros_like(num_passes), zeros))[1]
