"""Losses of preferences and their gradients, equal to the formulas of `preference_formulas` in float64."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from preference_formulas import Answer, Options, label_loss, pair_loss

from trillora.engine.preference.answers import Answers, Pairs, counts_of_labels, counts_of_pairs
from trillora.engine.preference.losses import (
    LABEL_LOSSES,
    PAIR_LOSSES,
    LossNumbers,
    divergence_of,
    sum_of_labels,
    sum_of_pairs,
)
from trillora.engine.step import Batch, Mean

SAME = 1e-11  # float64, after exponentials
LENGTHS = ((3, 7), (5, 1), (1, 1), (4, 6))  # of the answers of each pair
OPTIONS = Options(
    beta=0.7,
    label_smoothing=0.1,
    gamma=0.4,
    ld_alpha=0.3,
    cpo_alpha=0.6,
    desirable_weight=1.3,
    undesirable_weight=0.7,
)
PLAIN = Options(label_smoothing=1e-3)  # the one that exo_pair needs
# Lowest log-probabilities of tokens: answers that are almost certain, usual ones, and some that no model would give.
SIZES = (1e-3, 4.0, 60.0)


def answers_of(size: float, lengths: Sequence[int], seed: int = 0) -> list[Answer]:
    """Random log-probabilities, of the policy with a gradient."""
    random = np.random.default_rng(seed)

    def some(length: int) -> torch.Tensor:
        return torch.tensor(random.uniform(-size, -2e-6, length))

    return [Answer(some(length).requires_grad_(), some(length)) for length in lengths]


def arrays_of(answers: Sequence[Answer], signs: Sequence[int]) -> tuple[jax.Array, jax.Array, Batch]:
    """The same in sequences of four answers: policy, reference and batch."""
    shape = (len(answers) // 4, 32)
    policy, reference, weights = (np.zeros(shape) for _ in range(3))
    segments = np.zeros(shape, np.int32)
    for number, (answer, sign) in enumerate(zip(answers, signs, strict=True)):
        row, place = divmod(number, 4)
        start = int((segments[row] > 0).sum())
        end = start + len(answer.policy)
        policy[row, start:end], reference[row, start:end] = answer.policy.detach().numpy(), answer.reference.numpy()
        weights[row, start:end], segments[row, start : end + 1] = sign, place + 1  # the last token predicts nothing
    batch = {"segments": jnp.asarray(segments), "weights": jnp.asarray(weights)}
    return jnp.asarray(policy), jnp.asarray(reference), batch


def assert_same(ours: tuple[Any, Any], expected: torch.Tensor, answers: Sequence[Answer], counted: Any) -> None:
    """Value and gradient. Answers have the same order in the batch."""
    value, gradient = ours
    assert value.dtype == gradient.dtype == jnp.float64
    expected.backward()
    wanted = torch.cat([torch.zeros_like(a.policy) if a.policy.grad is None else a.policy.grad for a in answers])
    assert float(value) == pytest.approx(expected.item(), rel=SAME, abs=1e-300)
    assert np.isfinite(np.asarray(gradient)).all()
    np.testing.assert_allclose(np.asarray(gradient)[counted], wanted.numpy(), rtol=1e-9, atol=SAME)


@pytest.mark.parametrize("options", [PLAIN, OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_loss_of_pairs(name: str, options: Options) -> None:
    losses, numbers = [(1.0, PAIR_LOSSES[name])], LossNumbers(**vars(options))

    def mean_loss(policy: jax.Array, reference: jax.Array, batch: Batch) -> jax.Array:
        counts = counts_of_pairs(batch)
        return sum_of_pairs(losses, policy, reference, Pairs.of(batch, counts), numbers)[0] / counts.divisor

    with jax.enable_x64(True):
        step = jax.jit(jax.value_and_grad(mean_loss))
        for size in SIZES:
            answers = answers_of(size, [length for pair in LENGTHS for length in pair])
            pairs = list(zip(answers[::2], answers[1::2], strict=True))
            policy, reference, batch = arrays_of(answers, [1, -1] * len(pairs))
            found = step(policy, reference, batch)
            assert_same(found, pair_loss([name], pairs, options), answers, batch["weights"] != 0)


@pytest.mark.parametrize("options", [PLAIN, OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize("name", LABEL_LOSSES)
def test_loss_of_labels(name: str, options: Options) -> None:
    losses, numbers = [(1.0, LABEL_LOSSES[name])], LossNumbers(**vars(options))
    labels = (True, False, False, True, True, False, True, False)

    def mean_loss(policy: jax.Array, reference: jax.Array, batch: Batch, kl: Mean) -> jax.Array:
        counts = counts_of_labels(batch)._replace(means={"kl": kl})
        return sum_of_labels(losses, policy, reference, Answers.of(batch, counts), numbers)[0] / counts.divisor

    with jax.enable_x64(True):
        step = jax.jit(jax.value_and_grad(mean_loss))
        lengths = [length for pair in LENGTHS for length in pair]
        shifts = set()
        for size, seed in itertools.product(SIZES, range(4)):
            answers, others = answers_of(size, lengths, seed), answers_of(size, lengths[::-1], 14 + seed)
            others_policy, others_reference, others_batch = arrays_of(others, [1] * len(others))
            kl = divergence_of(others_policy, others_reference, others_batch)
            policy, reference, batch = arrays_of(answers, [1 if label else -1 for label in labels])
            found = step(policy, reference, batch, kl)
            assert_same(found, label_loss(name, answers, labels, others, options), answers, batch["weights"] != 0)
            shifts.add(bool(kl.sum > 0))
        assert shifts == {True, False}, "the estimate is above zero, and below, where it is taken as zero"
