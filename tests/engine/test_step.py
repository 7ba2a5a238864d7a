"""One training step equals PyTorch's optimizers on the gradient of the mean loss over supervised tokens.

This tests the step alone, on a linear model; `test_architectures.py` tests real models.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from trillora.engine.hash_random import MaskKey, keep_mask
from trillora.engine.optim import OptimizerName, ScheduleName, make_optimizer, make_schedule
from trillora.engine.step import SETTLED, Batch, TrainState, initial_state, make_train_step, token_objective

pytestmark = pytest.mark.core

ROWS, TOKENS, WIDTH = 8, 5, 3
ROUNDING = 1e-5  # relative: float32 arithmetic in another order, over a few steps
WEIGHT_DECAY = 0.1


def adapter() -> dict[str, jax.Array]:
    generator = np.random.default_rng(0)
    return {
        "a": jnp.asarray(generator.normal(size=WIDTH), jnp.float32),
        "b": jnp.asarray(generator.normal(size=(2, WIDTH)), jnp.float32),
    }


BASE = {"w": np.array([1.0, -2.0, 0.5], np.float32)}


def batch(step: int, *, weights: np.ndarray | None = None) -> Batch:
    """The "tokens" are vectors, for a linear model. The number of supervised tokens differs between sequences."""
    generator = np.random.default_rng([1, step])
    uneven = (np.arange(TOKENS) < 1 + np.arange(ROWS)[:, None] % TOKENS).astype(np.float32)
    return {
        "tokens": jnp.asarray(generator.normal(size=(ROWS, TOKENS, WIDTH)), jnp.float32),
        "targets": jnp.asarray(generator.normal(size=(ROWS, TOKENS)), jnp.float32),
        "weights": jnp.asarray(uneven if weights is None else weights),
    }


def loss(adapter: Any, base: Any, batch: Batch, key: Any = None) -> jax.Array:
    """Squared error, summed over supervised tokens; NaN if any token is NaN."""
    weight = base["w"] + adapter["a"] + adapter["b"].sum(0) ** 2
    return (((batch["tokens"] @ weight - batch["targets"]) ** 2) * batch["weights"]).sum()


def noisy_loss(adapter: Any, base: Any, batch: Batch, key: MaskKey) -> jax.Array:
    """Drops half of the tokens, by a mask for each sequence."""
    kept = keep_mask(key, 0.5, batch["weights"].shape)
    return loss(adapter, base, {**batch, "weights": batch["weights"] * kept})


@functools.cache
def step_function(
    optimizer: OptimizerName = "adamw",
    *,
    schedule: ScheduleName = "constant",
    weight_decay: float = WEIGHT_DECAY,
    clip: float | None = None,
    parts: int = 1,
    loss: Any = loss,
) -> tuple[Any, TrainState]:
    chosen = make_optimizer(optimizer, weight_decay)
    step = make_train_step(
        token_objective(loss),
        chosen,
        make_schedule(schedule, 0.05, 2, 10),
        max_grad_norm=clip,
        num_micro_batches=parts,
    )
    return jax.jit(step), initial_state(adapter(), chosen, seed=0)


def torch_gradients(parameters: dict[str, torch.nn.Parameter], batch: Batch) -> None:
    """Gradients of the mean loss over supervised tokens, by autograd, into `.grad`."""
    tokens, targets, weights = (torch.tensor(np.asarray(batch[name])) for name in ("tokens", "targets", "weights"))
    weight = torch.tensor(BASE["w"]) + parameters["a"] + parameters["b"].sum(0) ** 2
    for parameter in parameters.values():
        parameter.grad = None
    ((((tokens @ weight - targets) ** 2) * weights).sum() / weights.sum()).backward()


def torch_parameters() -> dict[str, torch.nn.Parameter]:
    return {name: torch.nn.Parameter(torch.tensor(np.asarray(a))) for name, a in adapter().items()}


def assert_close(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, array in expected.items():
        reference = array.detach().numpy() if isinstance(array, torch.Tensor) else np.asarray(array)
        np.testing.assert_allclose(np.asarray(ours[name]), reference, rtol=ROUNDING, atol=ROUNDING)


def assert_same_bits(ours: Any, expected: Any) -> None:
    ours, expected = jax.tree.leaves(ours), jax.tree.leaves(expected)
    assert len(ours) == len(expected) > 0
    for mine, other in zip(ours, expected, strict=True):
        if jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, other = jax.random.key_data(mine), jax.random.key_data(other)
        assert np.asarray(mine).tobytes() == np.asarray(other).tobytes()


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
@pytest.mark.parametrize("weight_decay", [0.0, WEIGHT_DECAY])
def test_adamw_equals_pytorch(weight_decay: float, clip: float | None) -> None:
    step, state = step_function("adamw", weight_decay=weight_decay, clip=clip)
    parameters = torch_parameters()
    reference = torch.optim.AdamW(parameters.values(), lr=0.05, weight_decay=weight_decay)
    for i in range(6):
        data = batch(i)
        state, metrics = step(state, BASE, data)
        torch_gradients(parameters, data)
        limit = math.inf if clip is None else clip
        norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), limit)
        reference.param_groups[0]["lr"] = float(metrics.learning_rate)
        reference.step()
        np.testing.assert_allclose(float(metrics.grad_norm), float(norm), rtol=ROUNDING)
        assert_close(state.adapter, parameters)
    assert np.abs(np.asarray(state.adapter["a"]) - np.asarray(adapter()["a"])).min() > 0.05


@pytest.mark.parametrize("weight_decay", [0.0, WEIGHT_DECAY])
def test_lion_follows_its_paper(weight_decay: float) -> None:
    """Chen et al. 2023, algorithm 2, in NumPy: two running averages, one for the sign and one for the momentum."""
    step, state = step_function("lion", weight_decay=weight_decay)
    parameters = torch_parameters()
    momentum = {name: np.zeros(p.shape, np.float64) for name, p in parameters.items()}
    for i in range(6):
        data = batch(i)
        state, metrics = step(state, BASE, data)
        torch_gradients(parameters, data)
        rate = float(metrics.learning_rate)
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            gradient, value = parameter.grad.numpy().astype(np.float64), parameter.detach().numpy().astype(np.float64)
            direction = np.sign(0.9 * momentum[name] + 0.1 * gradient)
            momentum[name] = 0.99 * momentum[name] + 0.01 * gradient
            parameter.data = torch.tensor(value - rate * (direction + weight_decay * value), dtype=torch.float32)
        assert_close(state.adapter, parameters)


@pytest.mark.parametrize("clip", [0.01, 1.0, 1e6])
def test_clipping_equals_pytorch(clip: float) -> None:
    """Seen in Lion's momentum: after the first step it is a hundredth of the clipped gradient."""
    step, state = step_function("lion", weight_decay=0.0, clip=clip)
    after, metrics = step(state, BASE, batch(0))
    parameters = torch_parameters()
    torch_gradients(parameters, batch(0))
    norm = torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip)
    np.testing.assert_allclose(float(metrics.grad_norm), float(norm), rtol=ROUNDING)
    assert_close(after.optimizer.mu, {name: 0.01 * p.grad for name, p in parameters.items() if p.grad is not None})


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_at_their_edges(name: ScheduleName) -> None:
    rate = make_schedule(name, 0.4, 4, 12)
    at = [float(rate(jnp.int32(i))) for i in range(15)]
    np.testing.assert_allclose(at[:5], [0.1, 0.2, 0.3, 0.4, 0.4], rtol=1e-6)  # warm-up to the peak
    middle, last, after = {
        "constant": (0.4, 0.4, 0.4),
        "linear": (0.2, 0.05, 0.0),
        "cosine": (0.2, 0.2 * (1 + math.cos(math.pi * 7 / 8)), 0.0),
    }[name]
    np.testing.assert_allclose([at[8], at[11], at[12], at[14]], [middle, last, after, after], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_schedules_without_warmup_start_at_the_peak(name: ScheduleName) -> None:
    rate = make_schedule(name, 0.4, 0, 10)
    assert float(rate(jnp.int32(0))) == pytest.approx(0.4)
    assert rate(jnp.int32(3)).dtype == jnp.float32


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (1, 1), (5, 5), (9, 5)])
def test_a_run_as_short_as_its_warmup_has_a_learning_rate(name: ScheduleName, warmup: int, steps: int) -> None:
    rate = make_schedule(name, 0.4, warmup, steps)
    for i in range(steps):
        assert float(rate(jnp.int32(i))) == pytest.approx(0.4 * min(1, (i + 1) / max(warmup, 1)))


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
@pytest.mark.parametrize("parts", [2, 4, 8])
@pytest.mark.parametrize("loss", [loss, noisy_loss])
def test_micro_batches_add_up_to_the_batch(optimizer: Literal["adamw", "lion"], parts: int, loss: Any) -> None:
    whole, state = step_function(optimizer, clip=1.0, loss=loss)
    in_parts, other = step_function(optimizer, clip=1.0, parts=parts, loss=loss)
    supervised = np.asarray(batch(0)["weights"]).reshape(-1, parts, TOKENS).sum((0, 2))
    assert len(set(supervised.tolist())) > 1, (
        "all parts have the same number of supervised tokens, so the test would prove nothing"
    )
    for i in range(3):
        state, metrics = whole(state, BASE, batch(i))
        other, other_metrics = in_parts(other, BASE, batch(i))
        assert_close(other_metrics._replace(means=0)._asdict(), metrics._replace(means=0)._asdict())
        assert_close(other.adapter, state.adapter)


def test_a_micro_batch_without_supervised_tokens_adds_nothing() -> None:
    weights = np.ones((ROWS, TOKENS), np.float32)
    weights[::2] = 0  # all sequences of the first of two parts
    step, state = step_function(parts=2)
    half = {name: array[1::2] for name, array in batch(0, weights=weights).items()}
    after, metrics = step(state, BASE, batch(0, weights=weights))
    expected, expected_metrics = step_function()[0](state, BASE, half)
    assert_close(after.adapter, expected.adapter)
    assert_close(metrics._replace(means=0)._asdict(), expected_metrics._replace(means=0)._asdict())


def test_the_loss_is_the_mean_over_supervised_tokens() -> None:
    step, state = step_function()
    _, metrics = step(state, BASE, batch(0))
    num_tokens = float(batch(0)["weights"].sum())
    assert float(metrics.num_tokens) == num_tokens < ROWS * TOKENS
    assert float(metrics.loss) == pytest.approx(float(loss(adapter(), BASE, batch(0))) / num_tokens)
    assert int(metrics.skipped) == 0


def test_a_batch_without_supervised_tokens_does_not_divide_by_zero() -> None:
    step, state = step_function(weight_decay=0.0)
    after, metrics = step(state, BASE, batch(0, weights=np.zeros((ROWS, TOKENS), np.float32)))
    assert (float(metrics.loss), float(metrics.num_tokens), float(metrics.grad_norm)) == (0, 0, 0)
    assert_same_bits(after.adapter, state.adapter)


def margin_loss(adapter: Any, base: Any, batch: Batch, key: Any = None) -> jax.Array:
    """Its gradient is zero if all targets are, as with pairs whose margin is large enough."""
    return (batch["tokens"] @ adapter["a"] * batch["targets"] * batch["weights"]).sum()


def test_batches_without_a_gradient_do_not_make_the_next_one_a_spike() -> None:
    step, state = step_function(clip=0.01, loss=margin_loss)
    for number in range(SETTLED + 10):
        has_gradient = not SETTLED <= number < SETTLED + 5
        given = batch(number)
        state, metrics = step(state, BASE, {**given, "targets": given["targets"] * has_gradient})
        assert (float(metrics.grad_norm) > 0.02) == has_gradient
        assert int(metrics.skipped) == 0, number


def with_bad_target(value: float, *, row: int) -> Batch:
    data = batch(9)
    return {**data, "targets": data["targets"].at[row, 0].set(value)}


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("clip", "parts"), [(None, 1), (1.0, 2)])
def test_a_loss_that_is_not_finite_changes_nothing(
    optimizer: OptimizerName, value: float, clip: float | None, parts: int
) -> None:
    step, state = step_function(optimizer, clip=clip, parts=parts)
    state, _ = step(state, BASE, batch(0))
    after, metrics = step(state, BASE, with_bad_target(value, row=3))
    assert int(metrics.skipped) == 1
    assert int(after.step) == int(state.step) + 1
    assert_same_bits((after.adapter, after.optimizer, after.key), (state.adapter, state.optimizer, state.key))
    further, metrics = step(after, BASE, batch(1))
    assert int(metrics.skipped) == 0
    assert not np.array_equal(further.adapter["a"], after.adapter["a"])


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
def test_a_gradient_that_is_not_finite_changes_nothing_if_the_loss_is(optimizer: OptimizerName) -> None:
    def steep(adapter: Any, base: Any, batch: Batch, key: Any) -> jax.Array:
        return jnp.sqrt(((adapter["a"] - adapter["a"]) ** 2).sum()) + loss(adapter, base, batch)

    step, state = step_function(optimizer, loss=steep)
    after, metrics = step(state, BASE, batch(0))
    assert np.isfinite(metrics.loss) and not np.isfinite(metrics.grad_norm)
    assert int(metrics.skipped) == 1
    assert_same_bits((after.adapter, after.optimizer), (state.adapter, state.optimizer))


@pytest.mark.parametrize("optimizer", get_args(OptimizerName))
@pytest.mark.parametrize(("learning_rate", "weight_decay"), [(3e38, 10.0), (100.0, 3e38)])
def test_an_update_that_is_not_finite_changes_nothing(
    optimizer: OptimizerName, learning_rate: float, weight_decay: float
) -> None:
    """The loss and its gradient are finite, but the new weights are not."""
    chosen = make_optimizer(optimizer, weight_decay)
    schedule = make_schedule("constant", learning_rate, 0, 10)
    step = jax.jit(make_train_step(token_objective(loss), chosen, schedule, max_grad_norm=1.0))
    state = initial_state(adapter(), chosen, seed=0)
    after, metrics = step(state, BASE, batch(0))
    assert np.isfinite(metrics.loss) and np.isfinite(metrics.grad_norm)
    assert int(metrics.skipped) == 3
    assert int(after.step) == int(state.step) + 1
    assert_same_bits((after.adapter, after.optimizer), (state.adapter, state.optimizer))


@pytest.mark.parametrize("parts", [1, 2])
def test_the_step_is_a_pure_function(parts: int) -> None:
    step, state = step_function(clip=1.0, parts=parts, loss=noisy_loss)
    before = jax.tree.map(jnp.copy, state)
    first, second = step(state, BASE, batch(0)), step(state, BASE, batch(0))
    assert_same_bits(first, second)
    assert_same_bits(state, before)
    again, fresh = step_function.__wrapped__(clip=1.0, parts=parts, loss=noisy_loss)
    assert_same_bits(again(fresh, BASE, batch(0)), first)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_every_step_and_every_sequence_has_its_own_mask_in_any_micro_batch(parts: int) -> None:
    """The first number of a token says which sequence it belongs to."""
    masks: list[dict[int, bytes]] = []
    data = batch(0)
    data["tokens"] = jnp.broadcast_to(jnp.arange(ROWS)[:, None, None], data["tokens"].shape).astype(jnp.float32)

    def recording(adapter: Any, base: Any, batch: Batch, key: MaskKey) -> jax.Array:
        def record(sequences: np.ndarray, kept: np.ndarray) -> None:
            masks[-1].update({int(s): k.tobytes() for s, k in zip(sequences, kept, strict=True)})

        kept = keep_mask(key, 0.5, (*batch["weights"].shape, 32))
        jax.debug.callback(record, batch["tokens"][:, 0, 0], kept)
        return loss(adapter, base, batch)

    step, state = step_function(parts=parts, loss=recording)
    for _ in range(3):
        masks.append({})
        state, _ = step(state, BASE, data)
        jax.effects_barrier()
    assert len({mask for step_masks in masks for mask in step_masks.values()}) == 3 * ROWS
    for number, step_masks in enumerate(masks):
        key = MaskKey(jax.random.fold_in(jax.random.key(0), number), jnp.arange(ROWS))
        expected = np.asarray(keep_mask(key, 0.5, (ROWS, TOKENS, 32)))
        assert step_masks == {sequence: mask.tobytes() for sequence, mask in enumerate(expected)}


def test_a_program_that_closes_over_its_weights_is_an_error_in_tests() -> None:
    """See conftest.py. It was one in `certify`: a model of 1B was compiled with 4.9 GB of constants."""
    weights = jnp.ones((256, 129))
    x = jnp.ones((1, 256))
    with pytest.raises(UserWarning, match="constants were captured"):
        jax.jit(lambda x: x @ weights).lower(x)
    jax.jit(lambda x, weights: x @ weights).lower(x, weights)
