"""One training step for several adapters that share the frozen base.

Every array of the state has a leading dim of N adapters. A call of the step trains K of them, its lanes, each on rows
of its own: the step of a single adapter is mapped over the lanes (`jax.vmap`). The base is not mapped, so its matmuls
are computed once, for the rows of all lanes together. Each adapter keeps its own learning rate, gradient norm,
optimizer state and random key, so training it among others gives what training it alone gives, up to rounding.

    step = make_group_step(objective_of, optimizer)
    lanes = Lanes(index_K=jnp.array([0, 2]), is_active_K=jnp.array([True, True]))
    state, metrics = step(state, base, options, lanes, batch)    # batch: arrays [K, B, T]; trains adapters 0 and 2

Legend: N adapters, K lanes, B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trillora.engine.optim import SCHEDULES, ScheduleName, decay_start
from trillora.engine.step import (
    Batch,
    GradNormStats,
    Objective,
    Pytree,
    StepMetrics,
    TrainState,
    choose,
    make_train_step,
)


class AdapterOptions(NamedTuple):
    """What may differ between the adapters of a step: arrays [N]."""

    schedule: Any  # index in SCHEDULES
    peak: Any  # learning rate
    warmup_steps: Any
    decay_start: Any  # step
    num_steps: Any
    max_grad_norm: Any
    scale: Any  # of the adapter's change, relative to the scale of the model's layers
    beta: Any  # of a loss of preferences


class Lanes(NamedTuple):
    """The adapters of one call. An adapter that is not active is computed and not changed: it fills a place."""

    index_K: Any
    is_active_K: Any


OPTION_DTYPES = AdapterOptions(jnp.int32, jnp.float32, jnp.int32, jnp.int32, jnp.int32, *(jnp.float32,) * 3)
LANE_DTYPES = Lanes(jnp.int32, jnp.bool_)


class OneAdapter(NamedTuple):
    """The options of one adapter as Python numbers."""

    schedule: ScheduleName
    peak: float
    warmup_steps: int
    num_steps: int
    decay_fraction: float | None
    max_grad_norm: float
    scale: float
    beta: float = 0.0


def adapter_options(adapters: Sequence[OneAdapter]) -> AdapterOptions:
    values = AdapterOptions(
        schedule=[SCHEDULES.index(a.schedule) for a in adapters],
        peak=[a.peak for a in adapters],
        warmup_steps=[a.warmup_steps for a in adapters],
        decay_start=[decay_start(a.schedule, a.warmup_steps, a.num_steps, a.decay_fraction) for a in adapters],
        num_steps=[a.num_steps for a in adapters],
        max_grad_norm=[a.max_grad_norm for a in adapters],
        scale=[a.scale for a in adapters],
        beta=[a.beta for a in adapters],
    )
    return AdapterOptions(*(np.array(column, dtype) for column, dtype in zip(values, OPTION_DTYPES, strict=True)))


def learning_rate(options: AdapterOptions, step: jax.Array) -> jax.Array:
    """`make_schedule` for one adapter whose options are arrays."""
    rising = jnp.minimum(1.0, (step + 1) / jnp.maximum(options.warmup_steps, 1))
    warmup = jnp.where(options.warmup_steps > 0, rising, 1.0)
    length = jnp.maximum(options.num_steps - options.decay_start, 1)
    done = jnp.clip((step - options.decay_start) / length, 0.0, 1.0)
    shapes = {"constant": jnp.ones_like(done), "cosine": 0.5 * (1.0 + jnp.cos(jnp.pi * done))}
    shape = jnp.select(
        [options.schedule == SCHEDULES.index(name) for name in shapes], list(shapes.values()), 1.0 - done
    )
    return jnp.asarray(options.peak * warmup * shape, jnp.float32)


ObjectiveOf = Callable[[AdapterOptions], Objective]  # what an adapter with these options minimizes


def group_state(
    adapters_N: Pytree, optimizer: optax.GradientTransformation, keys_N: jax.Array, *, keeps_reference: bool = False
) -> TrainState:
    """The state before the first step. `keys_N` are the adapters' random keys, one per seed."""

    def one(adapter: Pytree, key: jax.Array) -> TrainState:
        typical = GradNormStats(jnp.float32(0), jnp.int32(0))
        reference = adapter if keeps_reference else None
        return TrainState(jnp.int32(0), adapter, optimizer.init(adapter), key, typical, reference)

    return jax.vmap(one)(adapters_N, keys_N)


def make_group_step(
    objective_of: ObjectiveOf,
    optimizer: optax.GradientTransformation,
    *,
    num_micro_batches: int = 1,
    mesh_axis: str | None = None,
) -> Callable[[TrainState, Pytree, AdapterOptions, Lanes, Batch], tuple[TrainState, StepMetrics]]:
    """`mesh_axis`: the axis of the mesh over which the lanes are spread, if there is one."""

    def group_step(
        state: TrainState, base: Pytree, options: AdapterOptions, lanes: Lanes, batch: Batch
    ) -> tuple[TrainState, StepMetrics]:
        def one(
            state: TrainState, options: AdapterOptions, is_active: jax.Array, batch: Batch
        ) -> tuple[Pytree, StepMetrics]:
            step = make_train_step(
                objective_of(options),
                optimizer,
                lambda number: learning_rate(options, number),
                max_grad_norm=options.max_grad_norm,
                num_micro_batches=num_micro_batches,
            )
            new, metrics = step(state, base, batch)
            return choose(is_active, _without_key(new), _without_key(state)), metrics

        chosen, own_options = jax.tree.map(lambda array: array[lanes.index_K], (state, options))
        each = jax.vmap(one, spmd_axis_name=mesh_axis)
        new, metrics = each(chosen, own_options, lanes.is_active_K, batch)
        updated = jax.tree.map(lambda old, own: old.at[lanes.index_K].set(own), _without_key(state), new)
        return updated._replace(key=state.key), metrics

    return group_step


def lane_of(tree_N: Pytree, number: jax.Array) -> Pytree:
    """One adapter of the group's arrays."""
    return jax.tree.map(lambda array: array[number], tree_N)


def _without_key(state: TrainState) -> Pytree:
    """Keys never change, and random keys cannot be selected by a condition."""
    return state._replace(key=None)  # type: ignore[arg-type]
