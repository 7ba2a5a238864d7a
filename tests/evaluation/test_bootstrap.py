"""The paired bootstrap: exact cases of the binomial and normal distributions, and how often it is right."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dose import dose

from trillora.evaluation.bootstrap import (
    MIN_ROWS,
    NUM_DRAWS,
    Sums,
    differences,
    draws,
    exp_quotient,
    mean_difference,
    shares,
)


def binomial_quantile(n: int, p: float, share: float) -> int:
    """The smallest k with P(X <= k) >= share."""
    total = 0.0
    for k in range(n + 1):
        total += math.comb(n, k) * p**k * (1 - p) ** (n - k)
        if total >= share:
            return k
    return n


@pytest.mark.parametrize(("num_rows", "num_right"), [(20, 6), (50, 10), (200, 20), (1000, 500)])
def test_a_share_against_nothing_has_the_interval_of_the_binomial_distribution(num_rows: int, num_right: int) -> None:
    """The base is never right, so the drawn differences are binomial. 2,000 draws find its quantiles up to one row, or
    up to 0.1 standard deviations."""
    right = [number < num_right for number in range(num_rows)]
    found = differences({"m": shares([False] * num_rows)}, {"m": shares(right)})["m"].interval()
    p = num_right / num_rows
    rows = max(1.0, 0.1 * math.sqrt(num_rows * p * (1 - p)))
    assert found.difference == pytest.approx(p)
    assert abs(found.low * num_rows - binomial_quantile(num_rows, p, 0.025)) <= rows
    assert abs(found.high * num_rows - binomial_quantile(num_rows, p, 0.975)) <= rows
    assert found.beyond_chance


def test_a_mean_has_the_interval_of_the_normal_distribution() -> None:
    noise = np.random.default_rng(0).normal(0, 1, (2, 400))
    base, adapter = shares(noise[0]), shares(noise[0] + 0.1 * noise[1] + 0.02)
    found = differences({"m": base}, {"m": adapter})["m"].interval()
    # Paired: only the noise of the difference counts, which is a tenth of the values' noise.
    error = 1.96 * (0.1 * noise[1]).std() / 20
    assert (found.high - found.low) / 2 == pytest.approx(error, rel=0.07)  # 2,000 draws
    assert (found.high + found.low) / 2 == pytest.approx(found.difference, abs=0.1 * error)


def test_equal_models_do_not_differ_and_few_rows_say_nothing() -> None:
    same = shares([True, False] * 20)
    found = differences({"m": same}, {"m": same})["m"].interval()
    assert (found.difference, found.low, found.high, found.beyond_chance) == (0, 0, 0, False)
    few = shares([True] * (MIN_ROWS - 1))
    assert differences({"m": few}, {"m": few}) == {}


def test_one_in_twenty_equal_models_seems_different() -> None:
    """Both are right with probability 0.4, so the 95 % interval should miss 0 in about 5 % of the tests."""
    dice, count = np.random.default_rng(1), dose(300, 3000)
    missed = 0
    for _ in range(count):
        base, adapter = (shares(dice.random(80) < 0.4) for _ in range(2))
        missed += differences({"m": base}, {"m": adapter})["m"].interval().beyond_chance
    assert abs(missed / count - 0.05) < 4 * math.sqrt(0.05 * 0.95 / count)


def test_every_draw_has_as_many_rows_as_the_test_and_the_draws_are_fixed() -> None:
    first, again = (np.concatenate(list(draws(2500))) for _ in range(2))
    assert first.shape == (NUM_DRAWS, 2500) and (first.sum(axis=1) == 2500).all() and (first == again).all()
    assert next(draws(12))[0].tolist() == [0, 3, 0, 3, 1, 1, 0, 0, 2, 0, 1, 1]  # in every version of NumPy
    # A count of a row in a draw is binomial: mean 1, variance 1 - 1/N.
    assert first.mean() == 1 and first.var() == pytest.approx(1, rel=0.01)


def test_a_ratio_of_sums_weighs_rows_by_their_tokens() -> None:
    tokens = np.array([1.0] * 10 + [9.0] * 10)
    base = Sums(np.stack([2.0 * tokens, tokens], axis=1))
    adapter = Sums(np.stack([np.where(tokens > 1, 1.0, 2.0) * tokens, tokens], axis=1))
    assert adapter.value == pytest.approx((10 * 2 + 90) / 100)
    found = differences({"loss": base}, {"loss": adapter})["loss"].interval()
    assert found.difference == pytest.approx(-0.9) and found.beyond_chance
    assert Sums(base.values_NK, exp_quotient).value == pytest.approx(math.exp(2))


def test_rows_without_a_value_do_not_count() -> None:
    sums = shares([None, True, None, False] * 10)
    assert sums.value == 0.5
    assert math.isnan(shares([None] * 12).value)
    nothing = differences({"m": shares([None] * 12)}, {"m": shares([None] * 12)})["m"].interval()
    assert not nothing.beyond_chance


def test_the_mean_of_several_files_is_surer_than_each() -> None:
    dice = np.random.default_rng(2)
    parts = [
        differences({"m": shares([0.0] * 60)}, {"m": shares(dice.normal(0.1, 1, 60))}, seed)["m"] for seed in range(9)
    ]
    widths = [part.interval().high - part.interval().low for part in parts]
    mean = mean_difference(parts)
    assert mean.observed == pytest.approx(np.mean([part.observed for part in parts]))
    # A third, because nine files are independent; up to the noise of 2,000 draws.
    assert mean.interval().high - mean.interval().low == pytest.approx(np.mean(widths) / 3, rel=0.1)
