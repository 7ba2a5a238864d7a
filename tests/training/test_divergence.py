"""A healthy run is never called diverged, however mixed its rows are, and a diverged one is found soon.

The losses are simulated: rows of very different difficulty, in random order, in batches of any size.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict

import pytest
from dose import dose

from trillora.training.divergence import NUM_FIRST, DivergenceMonitor

pytestmark = pytest.mark.core

MAX_BAD_STEPS = 10  # the default of train.max_bad_steps
GUESSING = math.log(50_000)
NUM_STEPS = dose(1500, 6000)
NUM_SEEDS = dose(8, 200)
Losses = Callable[[random.Random], Iterator[float]]


def falling(start: float, end: float, steps: float = 300) -> Iterator[float]:
    for step in range(1_000_000):
        yield end + (start - end) * math.exp(-step / steps)


def noisy(generator: random.Random) -> Iterator[float]:
    """Falls with noise; every hundredth batch is an outlier."""
    for level in falling(4.0, 1.5):
        yield max(0.0, level + generator.gauss(0, 0.4) + (4 if generator.random() < 0.01 else 0))


def two_kinds(generator: random.Random) -> Iterator[float]:
    """One kind of row is soon known by heart; the other can never be guessed. Any share of hard rows."""
    share, hard = generator.uniform(0.01, 0.99), generator.uniform(2.0, 12.0)
    for easy in falling(generator.uniform(1, 6), 0.0, 50):
        yield max(0.0, generator.gauss(hard, 0.1) if generator.random() < share else easy + generator.gauss(0, 0.01))


def heavy_tails(generator: random.Random) -> Iterator[float]:
    """The logarithm of the loss is normal: the highest of a thousand losses is fifty times the median."""
    for level in falling(2.0, 0.3):
        yield min(15.0, level * math.exp(generator.gauss(0, 1.2)))


def wrong_labels(generator: random.Random) -> Iterator[float]:
    """All rows start alike. The longer it trains, the surer the model, and the worse a wrong label."""
    share = generator.uniform(0.02, 0.2)
    for certainty in falling(0.7, 8.0, 1000):
        yield certainty if generator.random() < share else math.exp(-certainty)


def batches_of(size: int, rows: Losses) -> Losses:
    def batches(generator: random.Random) -> Iterator[float]:
        losses = rows(generator)
        while True:
            yield sum(next(losses) for _ in range(size)) / size

    return batches


def spikes(generator: random.Random) -> Iterator[float]:
    """Up to five absurd steps in a row, from which the run recovers."""
    for level in falling(3.0, 1.0):
        if generator.random() < 0.01:
            for _ in range(generator.randrange(1, 6)):
                yield level + generator.uniform(4, 50)
        yield level + generator.gauss(0, 0.2)


HEALTHY: dict[str, Losses] = {
    "noisy": noisy,
    "two kinds": two_kinds,
    "two kinds, batches of 4": batches_of(4, two_kinds),
    "heavy tails": heavy_tails,
    "wrong labels": wrong_labels,
    "wrong labels, batches of 2": batches_of(2, wrong_labels),
    "spikes": spikes,
}


def most_bad_steps(monitor: DivergenceMonitor, losses: Iterator[float], first: int, last: int) -> int:
    """The most bad steps in a row."""
    most = 0
    for step in range(first, last + 1):
        monitor.observe(step, next(losses), grad_norm=0.5, skipped=False)
        most = max(most, monitor.num_bad)
    return most


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_is_never_called_diverged(name: str) -> None:
    for seed in range(NUM_SEEDS):
        losses = HEALTHY[name](random.Random(f"{name} {seed}"))
        assert most_bad_steps(DivergenceMonitor(GUESSING), losses, 1, NUM_STEPS) < MAX_BAD_STEPS, seed


@pytest.mark.parametrize("name", [name for name in HEALTHY if name != "spikes"])
@pytest.mark.parametrize("steps_before", [NUM_FIRST, 50, 1000])
def test_a_diverged_run_is_found_in_a_few_steps(name: str, steps_before: int) -> None:
    """The loss rises to the loss of guessing within 50 steps and stays there."""
    num_found = 0
    for seed in range(dose(8, 300)):
        generator = random.Random(f"{name} {seed}")
        monitor, losses = DivergenceMonitor(GUESSING), HEALTHY[name](generator)
        step = 0
        while step < steps_before or monitor.num_bad:
            step += 1
            monitor.observe(step, next(losses), grad_norm=0.5, skipped=False)
        num_rising = generator.randrange(1, 50)
        for risen in range(1, num_rising + 3 * MAX_BAD_STEPS):
            part = min(1.0, risen / num_rising)
            loss = (1 - part) * next(losses) + part * (1.3 * GUESSING + generator.gauss(0, 0.5))
            monitor.observe(step + risen, loss, grad_norm=0.5, skipped=False)
            if monitor.num_bad == MAX_BAD_STEPS:
                break
        has_absurd_rows = monitor.usual is not None and monitor.usual > 0.9 * GUESSING  # then nothing can be said
        assert has_absurd_rows or monitor.num_bad == MAX_BAD_STEPS, seed
        num_found += monitor.num_bad == MAX_BAD_STEPS
    assert num_found > 0


def test_the_report_names_what_was_bad() -> None:
    monitor = DivergenceMonitor(guessing=6.0)
    most_bad_steps(monitor, iter([1.0] * 300), 1, 300)
    monitor.observe(301, math.nan, math.nan, skipped=True)
    monitor.observe(302, 5.0, 0.5, skipped=False)
    monitor.observe(303, 6.5, 0.5, skipped=False)
    monitor.observe(304, 2.0, 0.0, skipped=False)
    assert monitor.first_bad == 301 and monitor.num_bad == 4
    assert monitor.bad == {
        "skipped": 1,
        "with a loss far above the usual ones": 1,
        "with a loss worse than guessing": 1,
        "without a gradient": 1,
    }


def test_hard_rows_become_usual_once_the_run_has_recovered() -> None:
    monitor = DivergenceMonitor(GUESSING)
    assert most_bad_steps(monitor, iter([*[0.0] * 50, *[5.0] * 8]), 1, 58) == 8
    assert most_bad_steps(monitor, iter([*[0.0] * 50, *[5.0] * 20]), 59, 128) == 0


def test_a_model_that_starts_worse_than_guessing_may_learn() -> None:
    losses = (20.0 - 0.1 * step for step in range(150))
    assert most_bad_steps(DivergenceMonitor(guessing=6.0), losses, 1, 150) == 0


def test_a_stage_with_another_loss_is_judged_by_its_own_first_loss() -> None:
    monitor = DivergenceMonitor(GUESSING)
    assert most_bad_steps(monitor, (3.0 - 0.01 * step for step in range(24)), 1, 24) == 0
    monitor.new_stage()
    assert most_bad_steps(monitor, (25.0 - 0.2 * step for step in range(30)), 25, 54) == 0  # IPO begins at 25


def test_rows_known_by_heart_need_no_gradient() -> None:
    monitor = DivergenceMonitor(GUESSING)
    for step in range(1, 50):
        monitor.observe(step, 0.0, grad_norm=0.0, skipped=False)
    assert monitor.num_bad == 0


def test_the_state_survives_a_checkpoint() -> None:
    losses, monitor = two_kinds(random.Random(0)), DivergenceMonitor(GUESSING)
    most_bad_steps(monitor, losses, 1, 500)
    restored = DivergenceMonitor(**json.loads(json.dumps(asdict(monitor))))
    assert restored == monitor
    later = [next(losses) for _ in range(200)]
    for one in (monitor, restored):
        most_bad_steps(one, iter(later), 501, 700)
    assert restored == monitor
