"""The training step: a pure function of (state, base, batch).

Micro-batches are accumulated inside; the loss is summed over supervised tokens and divided once by their number in the
whole batch, so that devices, micro-batches and packing all give the same update.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from trillora.engine.loss import Totals
from trillora.engine.optim import Schedule

Tree = Any
Batch = dict[str, jax.Array]  # tokens, targets, weights, segments, positions: each [B, T]
Loss = Callable[[Tree, Tree, Batch, jax.Array], jax.Array]  # (adapter, base, batch, dropout key) -> summed loss
Evaluation = Callable[[Tree, Tree, Batch], Totals]


class TrainState(NamedTuple):
    """All that changes. The base is not here: it is frozen."""

    step: jax.Array
    adapter: Tree
    optimizer: Any
    key: jax.Array  # of dropout; folded with the step, never consumed


class StepMetrics(NamedTuple):
    """Left on the device; read when convenient."""

    loss: jax.Array  # mean over the batch's supervised tokens
    num_tokens: jax.Array
    grad_norm: jax.Array
    learning_rate: jax.Array
    skipped: jax.Array  # 1 where the loss or a gradient was not finite and nothing was changed


def initial_state(adapter: Tree, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    return TrainState(jnp.int32(0), adapter, optimizer.init(adapter), jax.random.key(seed))


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    schedule: Schedule,
    *,
    max_grad_norm: float | None,
    num_micro_batches: int = 1,
) -> Callable[[TrainState, Tree, Batch], tuple[TrainState, StepMetrics]]:
    def train_step(state: TrainState, base: Tree, batch: Batch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(state.key, state.step)
        sums = accumulate(loss, state.adapter, base, batch, key, num_micro_batches)
        num_tokens = batch["weights"].sum()
        loss_mean, gradients = jax.tree.map(lambda x: x / jnp.maximum(num_tokens, 1), sums)
        grad_norm = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(gradients)))
        if max_grad_norm is not None:
            shrink = jnp.minimum(1.0, max_grad_norm / (grad_norm + 1e-6))
            gradients = jax.tree.map(lambda g: g * shrink, gradients)

        direction, optimizer_state = optimizer.update(gradients, state.optimizer, state.adapter)
        learning_rate = schedule(state.step)
        adapter = jax.tree.map(lambda a, d: a - learning_rate * d, state.adapter, direction)

        finite = jnp.isfinite(loss_mean) & jnp.isfinite(grad_norm)
        adapter, optimizer_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), (adapter, optimizer_state), (state.adapter, state.optimizer)
        )
        metrics = StepMetrics(loss_mean, num_tokens, grad_norm, learning_rate, (~finite).astype(jnp.int32))
        return TrainState(state.step + 1, adapter, optimizer_state, state.key), metrics

    return train_step


def accumulate(
    loss: Loss, adapter: Tree, base: Tree, batch: Batch, key: jax.Array, num_micro_batches: int
) -> tuple[jax.Array, Tree]:
    """Summed loss and gradient of a batch, `num_micro_batches` parts one after another."""
    gradient = jax.value_and_grad(loss)
    if num_micro_batches == 1:
        return gradient(adapter, base, batch, jax.random.fold_in(key, 0))

    def one(sums: tuple[jax.Array, Tree], part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        micro_batch, index = part
        new = gradient(adapter, base, micro_batch, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, sums, new), None

    def split(rows: jax.Array) -> jax.Array:
        # Every n-th row, so that each part has rows of every device.
        return rows.reshape(-1, num_micro_batches, *rows.shape[1:]).swapaxes(0, 1)

    start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, adapter))
    parts = (jax.tree.map(split, batch), jnp.arange(num_micro_batches))
    return jax.lax.scan(one, start, parts)[0]


def make_eval_step(evaluation: Evaluation) -> Callable[[Tree, Tree, Batch], dict[str, jax.Array]]:
    """Sums over one batch; the caller adds batches up and divides once."""

    def eval_step(adapter: Tree, base: Tree, batch: Batch) -> dict[str, jax.Array]:
        sums = evaluation(adapter, base, batch)
        return {"loss": sums.loss, "num_correct": sums.num_correct, "num_tokens": batch["weights"].sum()}

    return eval_step
