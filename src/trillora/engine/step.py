"""The training step: a pure function of (state, base, batch).

Gradients are accumulated over micro-batches. The loss is summed over the supervised tokens, or over pairs of answers,
and divided once, by their number in the whole batch, so devices, micro-batches and packing do not change the update.

    step = make_train_step(token_objective(loss), optimizer, schedule, max_grad_norm=1.0)
    state, metrics = step(state, base, batch)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from trillora.engine.hash_random import MaskKey
from trillora.engine.optim import Schedule
from trillora.engine.types import Pytree

Batch = dict[str, jax.Array]  # tokens, targets, weights, segments, positions: each [B, T]
Loss = Callable[[Pytree, Pytree, Batch, MaskKey], jax.Array]  # (adapter, base, batch, dropout key) -> summed loss
Sums = dict[str, jax.Array]
# (adapter, reference, base, beta, batch) -> sums
Evaluation = Callable[[Pytree, Pytree, Pytree, jax.Array, Batch], Sums]
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


class Mean(NamedTuple):
    """A mean that is not divided yet, so that the parts of a batch can be added up."""

    sum: jax.Array
    weight: jax.Array


Means = dict[str, Mean]


class Counts(NamedTuple):
    """What is known of the whole batch before its first micro-batch is computed."""

    divisor: jax.Array  # of the summed loss
    num_tokens: jax.Array  # trained ones
    num_wanted: jax.Array  # of these in answers that are learned or chosen, by their weights
    means: Means  # of `Objective.before`


class Objective(NamedTuple):
    """What a step minimizes: sums over a micro-batch, divided once by a number of the whole batch."""

    # (adapter, reference, base, micro-batch, dropout key, counts) -> summed loss, and what to report
    sums: Callable[[Pytree, Pytree, Pytree, Batch, MaskKey, Counts], tuple[jax.Array, Means]]
    counts: Callable[[Batch], Counts]
    reported: tuple[str, ...] = ()  # the names of these means
    # Computed for all micro-batches first, without a gradient: (adapter, reference, base, micro-batch) -> means
    before: Callable[[Pytree, Pytree, Pytree, Batch], Means] | None = None


def token_objective(loss: Loss) -> Objective:
    """The mean of a loss over the supervised tokens."""

    def sums(
        adapter: Pytree, _reference: Pytree, base: Pytree, batch: Batch, key: MaskKey, _counts: Counts
    ) -> tuple[jax.Array, Means]:
        return loss(adapter, base, batch, key), {}

    def counts(batch: Batch) -> Counts:
        total_weight, num_tokens = batch["weights"].sum(), (batch["weights"] > 0).sum(dtype=jnp.float32)
        divisor = jnp.where(total_weight > 0, total_weight, 1)
        return Counts(divisor, num_tokens, divisor, {})

    return Objective(sums, counts)


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
    reference: Pytree = None  # the adapter at the start of the stage, where preferences are compared with it


class StepMetrics(NamedTuple):
    """Stays on the device, so that the host need not wait for it."""

    loss: jax.Array  # mean over the batch's supervised tokens, or over its pairs
    num_tokens: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array  # 0: updated; otherwise why not, see `WHY_SKIPPED`
    means: Sums  # of a loss of preferences: rewards and others, by TRL's names


def initial_state(
    adapter: Pytree, optimizer: optax.GradientTransformation, seed: int, *, keeps_reference: bool = False
) -> TrainState:
    return next_stage(adapter, optimizer.init(adapter), seed, 0, keeps_reference=keeps_reference)


def next_stage(
    adapter: Pytree, optimizer_state: Pytree, seed: int, stage: int, *, keeps_reference: bool = False
) -> TrainState:
    """The state at the first step of a stage: adapter and optimizer are kept, the step counter restarts at zero."""
    key = jax.random.fold_in(jax.random.key(seed), stage) if stage else jax.random.key(seed)
    typical = GradNormStats(jnp.float32(0), jnp.int32(0))
    reference = adapter if keeps_reference else None
    return TrainState(jnp.int32(0), adapter, optimizer_state, key, typical, reference)


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    max_grad_norm: float | jax.Array | None,
    num_micro_batches: int = 1,
) -> Callable[[TrainState, Pytree, Batch], tuple[TrainState, StepMetrics]]:
    def train_step(state: TrainState, base: Pytree, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step)
        counts = objective.counts(batch)
        if objective.before is not None:
            counts = counts._replace(means=accumulate_before(objective, state, base, batch, num_micro_batches))
        (loss_sum, means), gradient_sums = accumulate(objective, state, base, batch, key, counts, num_micro_batches)
        loss_mean, gradients = jax.tree.map(lambda x: x / counts.divisor, (loss_sum, gradient_sums))
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
            lambda new, old: jnp.where(finite & (counts.num_tokens > 0) & (grad_norm > 0), new, old),
            with_norm(state.typical, grad_norm, spike),
            state.typical,
        )
        skipped = jnp.select([~finite, spike, ~finite_update], [1, 2, 3], 0).astype(jnp.int32)
        shown = divided({**counts.means, **means})
        metrics = StepMetrics(loss_mean, counts.num_tokens, grad_norm, learning_rate, skipped, shown)
        return TrainState(state.step + 1, adapter, optimizer_state, state.key, typical, state.reference), metrics

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


def divided(means: Means) -> Sums:
    """The means; of preferences also the margin, and how many pairs or answers they are about."""
    values = {name: mean.sum / jnp.where(mean.weight > 0, mean.weight, 1) for name, mean in means.items()}
    if "rewards/chosen" in values:
        values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
        values["pairs"] = means["rewards/accuracies"].weight
    return values


def accumulate(
    objective: Objective,
    state: TrainState,
    base: Pytree,
    batch: Batch,
    key: jax.Array,
    counts: Counts,
    num_micro_batches: int,
) -> tuple[tuple[jax.Array, Means], Pytree]:
    """Sums and gradient of a batch, computed in `num_micro_batches` parts, one after another."""
    gradient = jax.value_and_grad(objective.sums, has_aux=True)
    batch_size = len(batch["weights"])

    def of_part(part: Batch, index_B: jax.Array) -> tuple[tuple[jax.Array, Means], Pytree]:
        found: tuple[tuple[jax.Array, Means], Pytree] = gradient(
            state.adapter, state.reference, base, part, MaskKey(key, index_B), counts
        )
        return found

    if num_micro_batches == 1:
        return of_part(batch, jnp.arange(batch_size))

    def one(sums: Pytree, part: tuple[Batch, jax.Array]) -> tuple[Pytree, None]:
        micro_batch, number = part
        index_B = number + jnp.arange(0, batch_size, num_micro_batches)
        return jax.tree.map(jnp.add, sums, of_part(micro_batch, index_B)), None

    means = {name: Mean(jnp.float32(0), jnp.float32(0)) for name in objective.reported}
    start = ((jnp.float32(0), means), jax.tree.map(jnp.zeros_like, state.adapter))
    parts = (_parts(batch, num_micro_batches), jnp.arange(num_micro_batches))
    return jax.lax.scan(one, start, parts)[0]


def accumulate_before(
    objective: Objective, state: TrainState, base: Pytree, batch: Batch, num_micro_batches: int
) -> Means:
    """What an objective needs to know of the whole batch, without a gradient."""
    assert objective.before is not None
    before, adapters = objective.before, jax.lax.stop_gradient((state.adapter, state.reference))
    if num_micro_batches == 1:
        return before(*adapters, base, batch)
    found = jax.lax.map(lambda part: before(*adapters, base, part), _parts(batch, num_micro_batches))
    means: Means = jax.tree.map(lambda parts: parts.sum(0), found)
    return means


def _parts(batch: Batch, num_micro_batches: int) -> Batch:
    """Micro-batch i of n takes sequences i, i + n, i + 2n, …: some of every device, so none of them moves."""
    return {
        name: array.reshape(-1, num_micro_batches, *array.shape[1:]).swapaxes(0, 1) for name, array in batch.items()
    }
