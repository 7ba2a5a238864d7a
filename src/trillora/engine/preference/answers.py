"""The answers and the pairs of a batch: arrays of tokens become arrays of answers.

The documents of a sequence come in twos: segment 1 is a chosen answer with its prompt, segment 2 the rejected one, and
so on. Weights of rejected and of bad answers are negative; their size is the weight of the row. Example, T = 8, one
pair whose answers have two tokens and one:

    segments   1 1 1 1 2 2 2 0      pairs.sums(values)   ([[v1 + v2]], [[v5]])
    weights    0 1 1 0 0 -1 0 0     pairs.lengths        ([[2]], [[1]])

Legend: B sequences, T tokens, K answers and P pairs of a sequence at most.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

import jax
import jax.numpy as jnp

from trillora.engine.step import Batch, Counts

SHORTEST = 2  # tokens of a document: one that is read and one that is predicted


@dataclass(frozen=True)
class Answers:
    """The answers of a batch. Arrays of tokens [B, T] become arrays of answers [B, K]."""

    segments_BT: jax.Array
    weights_BT: jax.Array
    counts: Counts  # of the whole batch

    @classmethod
    def of(cls, batch: Batch, counts: Counts | None = None) -> Self:
        """Without counts, what needs them cannot be asked for."""
        nothing = Counts(jnp.float32(1), jnp.float32(0), jnp.float32(1), {})
        return cls(batch["segments"], batch["weights"], counts or nothing)

    @property
    def is_counted_BT(self) -> jax.Array:
        return self.weights_BT != 0

    @cached_property
    def _is_of_BKT(self) -> jax.Array:
        """Which tokens belong to which answer. It is never in memory: it is a part of the sums over it."""
        most = self.segments_BT.shape[1] // (2 * SHORTEST) * 2
        return self.segments_BT[:, None, :] == jnp.arange(1, max(most, 2) + 1)[None, :, None]

    def all_sums(self, values_BT: jax.Array) -> jax.Array:
        """The sum over the trained tokens of every answer [B, K]."""
        counted = jnp.where(self.is_counted_BT, values_BT, 0)
        return jnp.where(self._is_of_BKT, counted[:, None, :], 0).sum(-1)

    @cached_property
    def lengths_BK(self) -> jax.Array:
        """Trained tokens of every answer; 0 where there is none."""
        return self.all_sums(jnp.ones_like(self.weights_BT))

    @cached_property
    def exists_BK(self) -> jax.Array:
        return self.lengths_BK > 0

    @cached_property
    def weight_BK(self) -> jax.Array:
        """The weight of the row, zero where there is no answer; negative for a rejected or a bad one."""
        return self.all_sums(self.weights_BT) / jnp.maximum(self.lengths_BK, 1)

    def means(self, values_BT: jax.Array) -> jax.Array:
        """The mean over the trained tokens of every answer."""
        return self.sums(values_BT) / self.lengths

    def sums(self, values_BT: jax.Array) -> jax.Array:
        """Like `all_sums`. An answer that does not exist has -1, with which every loss and its gradient are finite."""
        return jnp.where(self.exists_BK, self.all_sums(values_BT), -1.0)

    @property
    def lengths(self) -> jax.Array:
        return jnp.maximum(self.lengths_BK, 1)

    @property
    def is_good(self) -> jax.Array:
        """The label of every answer."""
        return self.weight_BK > 0

    @property
    def total_weight(self) -> jax.Array:
        """The weight of all answers of the batch, not only of these."""
        return self.counts.divisor

    def of_tokens(self, values_BK: jax.Array) -> jax.Array:
        """The value of its answer for every token [B, T], 0 for padding."""
        padded = jnp.pad(values_BK, ((0, 0), (1, 0)))
        index = jnp.minimum(self.segments_BT, padded.shape[1] - 1)
        return jnp.take_along_axis(padded, index, axis=1)

    @cached_property
    def places_BT(self) -> jax.Array:
        """The number of trained tokens of the same answer that come before."""
        ends_BK = jnp.cumsum(self.lengths_BK, axis=1)
        before_BT = jnp.cumsum(self.is_counted_BT, axis=1) - self.is_counted_BT
        return before_BT - self.of_tokens(ends_BK - self.lengths_BK)


class Pairs(Answers):
    """The pairs of a batch. What is an array [B, K] for answers is two arrays [B, P], of chosen and rejected ones."""

    @staticmethod
    def both(values_BK: jax.Array) -> tuple[jax.Array, jax.Array]:
        return values_BK[:, 0::2], values_BK[:, 1::2]

    def sums(self, values_BT: jax.Array) -> tuple[jax.Array, jax.Array]:  # type: ignore[override]
        """The sums over the trained tokens of the chosen and of the rejected answers [B, P]."""
        return self.both(super().sums(values_BT))

    def means(self, values_BT: jax.Array) -> tuple[jax.Array, jax.Array]:  # type: ignore[override]
        (chosen, rejected), (num_chosen, num_rejected) = self.sums(values_BT), self.lengths
        return chosen / num_chosen, rejected / num_rejected

    @property
    def lengths(self) -> tuple[jax.Array, jax.Array]:  # type: ignore[override]
        """The numbers of trained tokens."""
        return self.both(jnp.maximum(self.lengths_BK, 1))

    @property
    def pair_weight_BP(self) -> jax.Array:
        return self.weight_BK[:, 0::2]

    def token_mean(self, values_BT: jax.Array) -> jax.Array:
        """Numbers [B, P] whose mean over all pairs is the mean of `values_BT` over all tokens of chosen answers."""
        return self.sums(values_BT)[0] * self.counts.divisor / self.counts.num_wanted

    def shortened(self, values_BT: jax.Array, alpha: float) -> jax.Array:
        """The values, times `alpha` after as many tokens as the shorter answer of the pair has."""
        if isinstance(alpha, float) and alpha == 1:
            return values_BT
        shorter_BP = jnp.minimum(*self.lengths)
        limit_BT = self.of_tokens(jnp.repeat(shorter_BP, 2, axis=1))
        return values_BT * jnp.where(self.places_BT < limit_BT, 1.0, alpha)


def counts_of_pairs(batch: Batch) -> Counts:
    """The divisor is the number of pairs: the sum of their weights."""
    return _counts(batch, Pairs.of(batch).pair_weight_BP.sum())


def counts_of_labels(batch: Batch) -> Counts:
    return _counts(batch, jnp.abs(Answers.of(batch).weight_BK).sum())


def _counts(batch: Batch, total: jax.Array) -> Counts:
    weights = batch["weights"]
    num_wanted = jnp.where(weights > 0, weights, 0).sum()
    num_tokens = (weights != 0).sum(dtype=jnp.float32)
    return Counts(jnp.where(total > 0, total, 1), num_tokens, jnp.where(num_wanted > 0, num_wanted, 1), {})
