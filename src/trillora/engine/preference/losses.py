"""Losses of preferences, as functions of the log-probabilities of tokens.

A loss of pairs gets the log-probabilities of the policy (the model with the adapter that is trained) and of the
reference (the model with the adapter at the start of the stage), [B, T] each, zero where a token is not trained, and
returns a number for every pair [B, P]:

    def dpo(policy, reference, pairs, numbers):
        chosen, rejected = pairs.sums(policy - reference)
        return -jax.nn.log_sigmoid(numbers.beta * (chosen - rejected))

The step adds the numbers of all pairs up and divides once by the number of pairs of the whole batch. The names and the
formulas are TRL's; `recipe.losses` has what each one needs.

The documents of a sequence come in twos: segment 1 is a chosen answer with its prompt, segment 2 the rejected one, and
so on. Weights of rejected and of bad answers are negative; their size is the weight of the row.

Legend: B sequences, T tokens, K answers and P pairs of a sequence at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from trillora.engine.preference.answers import Answers, Pairs
from trillora.engine.step import Batch, Mean, Means

CERTAIN = -1e-6  # log-probabilities of an answer above this are taken as this, where 1 - p is a divisor
DISCOVERED = 0.05  # the temperature of `discopop`, from its paper
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "logps/chosen", "logps/rejected")


class LossNumbers(NamedTuple):
    """The numbers of the recipe. Beta may be an array without dimensions, for a sweep."""

    beta: float | jax.Array = 0.1
    label_smoothing: float = 0.0
    gamma: float = 1.0
    ld_alpha: float = 1.0
    cpo_alpha: float = 1.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0


PairLoss = Callable[[jax.Array, jax.Array, Pairs, LossNumbers], jax.Array]
LabelLoss = Callable[[jax.Array, jax.Array, Answers, LossNumbers], jax.Array]


# With a reference: `ratios` are the log-probabilities of both answers relative to it, times beta.


def _ratios(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> tuple[jax.Array, jax.Array]:
    chosen, rejected = pairs.sums(pairs.shortened(policy - reference, n.ld_alpha))
    return n.beta * chosen, n.beta * rejected


def _mean_ratios(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    """The difference of the mean log-ratios."""
    chosen, rejected = pairs.means(pairs.shortened(policy - reference, n.ld_alpha))
    return chosen - rejected


def _smoothed(margin: jax.Array, n: LossNumbers) -> jax.Array:
    e = n.label_smoothing
    return -(1 - e) * jax.nn.log_sigmoid(margin) - e * jax.nn.log_sigmoid(-margin) if e else -jax.nn.log_sigmoid(margin)


def dpo(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    return _smoothed(chosen - rejected, n)


def hinge(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    return jax.nn.relu(1 - (chosen - rejected))


def ipo(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    return (_mean_ratios(policy, reference, pairs, n) - 1 / (2 * n.beta)) ** 2


def robust(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    margin, e = chosen - rejected, n.label_smoothing
    return (-(1 - e) * jax.nn.log_sigmoid(margin) + e * jax.nn.log_sigmoid(-margin)) / (1 - 2 * e)


def exo_pair(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    margin, e = chosen - rejected, n.label_smoothing
    agrees = jax.nn.sigmoid(margin) * (jax.nn.log_sigmoid(margin) - math.log1p(-e))
    return agrees + jax.nn.sigmoid(-margin) * (jax.nn.log_sigmoid(-margin) - math.log(e))


def nca_pair(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    return -jax.nn.log_sigmoid(chosen) - 0.5 * jax.nn.log_sigmoid(-chosen) - 0.5 * jax.nn.log_sigmoid(-rejected)


def bco_pair(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    return -jax.nn.log_sigmoid(chosen) - jax.nn.log_sigmoid(-rejected)


def sppo_hard(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = pairs.sums(pairs.shortened(policy - reference, n.ld_alpha))
    return (chosen - 0.5 / n.beta) ** 2 + (rejected + 0.5 / n.beta) ** 2


def apo_zero(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    return 1 - jax.nn.sigmoid(chosen) + jax.nn.sigmoid(rejected)


def apo_down(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    return jax.nn.sigmoid(chosen) + 1 - jax.nn.sigmoid(chosen - rejected)


def discopop(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = _ratios(policy, reference, pairs, n)
    margin = chosen - rejected
    share = jax.nn.sigmoid(margin / DISCOVERED)
    return (1 - share) * -jax.nn.log_sigmoid(margin) + share * jnp.exp(-margin)


def sigmoid_norm(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    return _smoothed(n.beta * _mean_ratios(policy, reference, pairs, n), n)


# Without a reference


def sft(policy: jax.Array, _reference: jax.Array, pairs: Pairs, _n: LossNumbers) -> jax.Array:
    """The chosen answers are learned."""
    return pairs.token_mean(-policy)


def cpo(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = pairs.sums(policy)
    return _smoothed(n.beta * (chosen - rejected), n) + n.cpo_alpha * sft(policy, reference, pairs, n)


def simpo(policy: jax.Array, _reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = pairs.means(policy)
    return _smoothed(n.beta * (chosen - rejected) - n.gamma, n)


def orpo(policy: jax.Array, reference: jax.Array, pairs: Pairs, n: LossNumbers) -> jax.Array:
    chosen, rejected = pairs.means(policy)
    log_odds = (chosen - rejected) - (_log_not(chosen) - _log_not(rejected))
    return sft(policy, reference, pairs, n) - n.beta * jax.nn.log_sigmoid(log_odds)


def _log_not(log_p: jax.Array) -> jax.Array:
    """log(1 - p)."""
    log_p = jnp.minimum(log_p, CERTAIN)
    is_small = log_p < -math.log(2)
    small, large = jnp.where(is_small, log_p, -1.0), jnp.where(is_small, -0.5, log_p)
    return jnp.where(is_small, jnp.log1p(-jnp.exp(small)), jnp.log(-jnp.expm1(large)))


# Of answers with a label


def kto(policy: jax.Array, reference: jax.Array, answers: Answers, n: LossNumbers) -> jax.Array:
    mean = answers.counts.means["kl"]
    shift = jnp.maximum(mean.sum / mean.weight, 0)
    ratio = answers.sums(policy - reference)
    signed = jnp.where(answers.is_good, ratio - shift, shift - ratio)
    return _label_weight(answers, n) * (1 - jax.nn.sigmoid(n.beta * signed))


def apo_zero_unpaired(policy: jax.Array, reference: jax.Array, answers: Answers, n: LossNumbers) -> jax.Array:
    reward = n.beta * answers.sums(policy - reference)
    return _label_weight(answers, n) * jnp.where(answers.is_good, 1 - jax.nn.sigmoid(reward), jax.nn.sigmoid(reward))


def _label_weight(answers: Answers, n: LossNumbers) -> jax.Array:
    return jnp.where(answers.is_good, n.desirable_weight, n.undesirable_weight)


PAIR_LOSSES: Mapping[str, PairLoss] = {
    "sigmoid": dpo,
    **{
        own.__name__: own
        for own in (
            *(hinge, ipo, robust, exo_pair, nca_pair, bco_pair, sppo_hard, apo_zero, apo_down, discopop),
            *(sigmoid_norm, sft, cpo, simpo, orpo),
        )
    },
}
LABEL_LOSSES: Mapping[str, LabelLoss] = {"kto": kto, "apo_zero_unpaired": apo_zero_unpaired}
REWARD_OF_MEANS = ("simpo", "orpo")  # losses whose rewards are means over tokens


def sum_of_pairs(
    losses: Sequence[tuple[float, PairLoss]],
    policy: jax.Array,
    reference: jax.Array,
    pairs: Pairs,
    numbers: LossNumbers,
    *,
    reward_of_means: bool = False,
) -> tuple[jax.Array, Means]:
    """The weighted sum of the losses over all pairs, and the metrics."""
    weight = pairs.pair_weight_BP
    total = sum((factor * loss(policy, reference, pairs, numbers) for factor, loss in losses), jnp.float32(0))
    chosen, rejected = pairs.means(policy - reference) if reward_of_means else pairs.sums(policy - reference)
    chosen, rejected = numbers.beta * chosen, numbers.beta * rejected
    of_chosen, of_rejected = pairs.means(policy) if reward_of_means else pairs.sums(policy)
    is_right = (chosen > rejected) + 0.5 * (
        chosen == rejected
    )  # equal rewards are a coin toss; TRL counts them as wrong
    values = (chosen, rejected, is_right, of_chosen, of_rejected)
    means = {
        name: Mean((weight * jax.lax.stop_gradient(value)).sum(), weight.sum())
        for name, value in zip(METRICS, values, strict=True)
    }
    return (weight * jnp.where(weight > 0, total, 0)).sum(), means


def sum_of_labels(
    losses: Sequence[tuple[float, LabelLoss]],
    policy: jax.Array,
    reference: jax.Array,
    answers: Answers,
    numbers: LossNumbers,
) -> tuple[jax.Array, Means]:
    """The weighted sum of the losses over all answers, and the metrics. An accuracy is the share of the answers whose
    reward has the right sign."""
    weight = jnp.abs(answers.weight_BK)
    total = sum((factor * loss(policy, reference, answers, numbers) for factor, loss in losses), jnp.float32(0))
    good, bad = (weight * (answers.is_good == is_good) for is_good in (True, False))
    log_p = jax.lax.stop_gradient(answers.sums(policy))
    reward = numbers.beta * jax.lax.stop_gradient(answers.sums(policy - reference))
    signed = jnp.where(answers.is_good, reward, -reward)
    is_right = (signed > 0) + 0.5 * (signed == 0)
    values = ((good, reward), (bad, reward), (weight, is_right), (good, log_p), (bad, log_p))
    means = {name: Mean((own * value).sum(), own.sum()) for name, (own, value) in zip(METRICS, values, strict=True)}
    return (weight * jnp.where(weight > 0, total, 0)).sum(), means


def divergence_of(policy: jax.Array, reference: jax.Array, batch: Batch) -> Mean:
    """KTO's estimate of how far the policy is from the reference: the mean log-ratio of answers to other questions."""
    answers = Answers.of(batch)
    exists = answers.exists_BK
    return Mean(jnp.where(exists, answers.all_sums(policy - reference), 0).sum(), exists.sum(dtype=jnp.float32))
