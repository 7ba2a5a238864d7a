"""The training step: a pure function of (state, base, batch).

Gradients are accumulated over micro-batches. The loss is summed over the supervised tokens and divided once, by their
number in the whole batch, so devices, micro-batches and packing do not change the update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from trillora.engine.hash_random import MaskKey
from trillora.engine.loss import Totals
from trillora.engine.optim import Schedule
from trillora.engine.types import Pytree

Batch = dict[str, jax.Array]  # tokens, targets, weights, segments, positions: each [B, T]
Loss = Callable[[Pytree, Pytree, Batch, MaskKey], jax.Array]  # (adapter, base, batch, dropout key) -> summed loss
Evaluation = Callable[[Pytree, Pytree, Batch], Totals]
# A gradient is a spike if its norm is this many times the typical norm and clipping would at least halve it. Smaller
# outliers are left to clipping.
SPIKE = 20.0
SETTLED = 20  # steps before any gradient is called a spike
MEMORY = 0.05  # weight of the newest step in the running mean
WHY_SKIPPED = {
    1: "the loss or its gradient was not finite",
    2: "the gradient norm was far above its usual range",
    3: "the new weights were not finite",
}


class GradNormStats(NamedTuple):
    """The typical gradient norm."""

    log_norm: jax.Array  # running mean
    num_steps: jax.Array


class TrainState(NamedTuple):
    """Everything that changes during training. The base is frozen, so it is not part of the state."""

    step: jax.Array  # counted from the start of the stage
    adapter: Pytree
    optimizer: Pytree
    key: jax.Array  # for dropout; each step folds in its number, the key itself never changes
    typical: GradNormStats


class StepMetrics(NamedTuple):
    """Stays on the device, so that the host need not wait for it."""

    loss: jax.Array  # mean over the batch's supervised tokens
    num_tokens: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array  # 0: updated; otherwise why not, see `WHY_SKIPPED`


def initial_state(adapter: Pytree, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    return next_stage(adapter, optimizer.init(adapter), seed, 0)


def next_stage(adapter: Pytree, optimizer_state: Pytree, seed: int, stage: int) -> TrainState:
    """The state at the first step of a stage: adapter and optimizer are kept, the step counter restarts at zero."""
    key = jax.random.fold_in(jax.random.key(seed), stage) if stage else jax.random.key(seed)
    return TrainState(jnp.int32(0), adapter, optimizer_state, key, GradNormStats(jnp.float32(0), jnp.int32(0)))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    max_grad_norm: float | jax.Array | None,
    num_micro_batches: int = 1,
) -> Callable[[TrainState, Pytree, Batch], tuple[TrainState, StepMetrics]]:
    def train_step(state: TrainState, base: Pytree, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step)
        sums = accumulate(loss, state.adapter, base, batch, key, num_micro_batches)
        total_weight, num_tokens = batch["weights"].sum(), (batch["weights"] > 0).sum(dtype=jnp.float32)
        divisor = jnp.where(total_weight > 0, total_weight, 1)
        loss_mean, gradients = jax.tree.map(lambda x: x / divisor, sums)
        grad_norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
        if max_grad_norm is not None:
            shrink = jnp.minimum(1.0, max_grad_norm / (grad_norm + 1e-6))
            gradients = jax.tree.map(lambda g: g * shrink, gradients)

        direction, optimizer_state = optimizer.update(gradients, state.optimizer, state.adapter)
        learning_rate = schedule(state.step)
        adapter = jax.tree.map(lambda a, d: a - learning_rate * d, state.adapter, direction)

        finite = jnp.isfinite(loss_mean) & jnp.isfinite(grad_norm)
        spike = finite & is_spike(grad_norm, state.typical, max_grad_norm)
        good = finite & ~spike
        before = (state.adapter, state.optimizer)
        # The barrier leaves the compiled update as it was without the check: equal numbers, bit for bit.
        updated = jax.lax.optimization_barrier(choose(good, (adapter, optimizer_state), before))
        finite_update = all_finite(updated[0])
        adapter, optimizer_state = choose(finite_update, updated, before)
        typical = jax.tree.map(
            lambda new, old: jnp.where(finite & (num_tokens > 0), new, old),
            with_norm(state.typical, grad_norm, spike),
            state.typical,
        )
        skipped = jnp.select([~finite, spike, ~finite_update], [1, 2, 3], 0).astype(jnp.int32)
        metrics = StepMetrics(loss_mean, num_tokens, grad_norm, learning_rate, skipped)
        return TrainState(state.step + 1, adapter, optimizer_state, state.key, typical), metrics

    return train_step


def choose(condition: jax.Array, one: Pytree, other: Pytree) -> Pytree:
    """One of two trees of equal shapes. `jnp.where` takes several times as long to trace, for each array of a tree."""
    return jax.tree.map(lambda a, b: jax.lax.select(condition, a, b), one, other)


def all_finite(tree: Pytree) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def is_spike(grad_norm: jax.Array, typical: GradNormStats, max_grad_norm: float | jax.Array | None) -> jax.Array:
    far = grad_norm > SPIKE * jnp.exp(typical.log_norm)
    large = grad_norm > 2 * (0.0 if max_grad_norm is None else max_grad_norm)
    return far & large & (typical.num_steps >= SETTLED)


def with_norm(typical: GradNormStats, grad_norm: jax.Array, spike: jax.Array) -> GradNormStats:
    """The statistics after one more step. A spike counts as twice the typical norm, so if the norm stays high, only a
    few steps are skipped before it counts as typical."""
    rate = jnp.maximum(1 / (typical.num_steps + 1.0), MEMORY)
    usual = typical.log_norm + rate * (jnp.log(jnp.maximum(grad_norm, 1e-12)) - typical.log_norm)
    return GradNormStats(jnp.where(spike, typical.log_norm + jnp.log(2.0), usual), typical.num_steps + 1)


def accumulate(
    loss: Loss, adapter: Pytree, base: Pytree, batch: Batch, key: jax.Array, num_micro_batches: int
) -> tuple[jax.Array, Pytree]:
    """Summed loss and gradient of a batch, computed in `num_micro_batches` parts, one after another."""
    gradient = jax.value_and_grad(loss)
    batch_size = len(batch["weights"])
    if num_micro_batches == 1:
        return gradient(adapter, base, batch, MaskKey(key, jnp.arange(batch_size)))

    def one(sums: tuple[jax.Array, Pytree], part: tuple[Batch, jax.Array]) -> tuple[tuple[jax.Array, Pytree], None]:
        micro_batch, number = part
        index_B = number + jnp.arange(0, batch_size, num_micro_batches)
        new = gradient(adapter, base, micro_batch, MaskKey(key, index_B))
        return jax.tree.map(jnp.add, sums, new), None

    def split(array: jax.Array) -> jax.Array:
        # Micro-batch i of n takes sequences i, i + n, i + 2n, …: some of every device, so none of them moves.
        return array.reshape(-1, num_micro_batches, *array.shape[1:]).swapaxes(0, 1)

    start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, adapter))
    parts = (jax.tree.map(split, batch), jnp.arange(num_micro_batches))
    return jax.lax.scan(one, start, parts)[0]


def make_eval_step(evaluation: Evaluation) -> Callable[[Pytree, Pytree, Batch], dict[str, jax.Array]]:
    """Returns sums over one batch; the caller adds up batches and divides once."""

    def eval_step(adapter: Pytree, base: Pytree, batch: Batch) -> dict[str, jax.Array]:
        sums = evaluation(adapter, base, batch)
        return {"loss": sums.loss, "num_correct": sums.num_correct, "num_tokens": batch["weights"].sum()}

    return eval_step
