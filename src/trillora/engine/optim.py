"""Optimizers and learning-rate schedules. An optimizer returns a direction; the train step multiplies it by the
learning rate. The schedule follows the step number, which also counts skipped updates.

The entries of every direction are about one in size, so learning rates are comparable. Lion's entries are signs, while
Adam's and Adafactor's are mostly below one: use a learning rate a few times smaller for Lion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from trillora.engine.lion8bit import scale_by_lion_8bit
from trillora.engine.types import Pytree

OptimizerName = Literal["adamw", "lion", "lion-8bit", "adafactor"]
ScheduleName = Literal["constant", "linear", "cosine", "wsd"]
SCHEDULES: tuple[ScheduleName, ...] = ("constant", "linear", "cosine", "wsd")
Schedule = Callable[[jax.Array], jax.Array]


def make_optimizer(
    name: OptimizerName,
    weight_decay: float,
    decayed: Mapping[str, bool] | None = None,
    factors: Mapping[str, float | np.ndarray] | None = None,
) -> optax.GradientTransformation:
    """An optimizer with PyTorch's default hyperparameters and decoupled weight decay (Loshchilov and Hutter, 2019).
    `decayed` says which parameters decay; None: all of them. The direction of each parameter is multiplied by its
    factor, a number or an array; None: by one."""
    makers: dict[str, Callable[[], optax.GradientTransformation]] = {
        "adamw": optax.scale_by_adam,
        "lion": optax.scale_by_lion,
        "lion-8bit": scale_by_lion_8bit,
        "adafactor": scale_by_adafactor,
    }
    parts = [makers[name]()]
    if weight_decay:
        parts.append(optax.add_decayed_weights(weight_decay, None if decayed is None else dict(decayed)))
    if factors is not None:
        parts.append(optax.stateless(lambda direction, _: {key: d * factors[key] for key, d in direction.items()}))
    return optax.chain(*parts) if len(parts) > 1 else parts[0]


def scale_by_adafactor() -> optax.GradientTransformation:
    """The gradient divided by the root of Adafactor's factored second moment, as in optax. The rest of Adafactor is
    left out: learning rate and clipping belong to the train step, as for every optimizer.

    optax factors the two largest dims, and in stacked layers one of them may be the stack. So it is mapped over the
    stack and sees one matrix at a time. By default it does not factor matrices with a side below 128, which would be
    every adapter; here all of them are factored.
    """
    of_matrix = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    stacked = optax.FactoredState(count=None, v_row=0, v_col=0, v=0)  # vmap axes: all but the counter are stacked

    def init_leaf(param: jax.Array) -> optax.FactoredState:
        function = of_matrix.init
        for _ in param.shape[:-2]:
            function = jax.vmap(function, out_axes=stacked)
        return function(param)

    def update_leaf(gradient: jax.Array, state: optax.FactoredState, param: jax.Array) -> Pytree:
        function = of_matrix.update
        for _ in param.shape[:-2]:
            function = jax.vmap(function, in_axes=(0, stacked, 0), out_axes=(0, stacked))
        return function(gradient, state, param)

    def collect(
        count: jax.Array, states: list[optax.FactoredState], structure: jax.tree_util.PyTreeDef
    ) -> optax.FactoredState:
        parts = ([getattr(state, name) for state in states] for name in ("v_row", "v_col", "v"))
        return optax.FactoredState(count, *(jax.tree.unflatten(structure, part) for part in parts))

    def init(params: Pytree) -> optax.FactoredState:
        leaves, structure = jax.tree.flatten(params)
        return collect(jnp.int32(0), [init_leaf(leaf) for leaf in leaves], structure)

    def update(gradients: Pytree, state: optax.FactoredState, params: Pytree) -> tuple[Pytree, optax.FactoredState]:
        leaves, structure = jax.tree.flatten(gradients)
        moments = (jax.tree.leaves(tree) for tree in (state.v_row, state.v_col, state.v))
        states = [optax.FactoredState(state.count, *parts) for parts in zip(*moments, strict=True)]
        updated = [update_leaf(*args) for args in zip(leaves, states, jax.tree.leaves(params), strict=True)]
        directions = jax.tree.unflatten(structure, [direction for direction, _ in updated])
        return directions, collect(state.count + 1, [new for _, new in updated], structure)

    return optax.GradientTransformation(init, update)


def make_schedule(
    name: ScheduleName, peak: float, warmup_steps: int, num_steps: int, decay_fraction: float | None = None
) -> Schedule:
    """Linear warm-up to `peak`, then constant or a decay that reaches zero right after the last step and stays there.
    `wsd` (warmup, stable, decay) stays at the peak and decays linearly over the last `decay_fraction` of all steps, or
    over fewer if the warm-up leaves fewer."""
    start = decay_start(name, warmup_steps, num_steps, decay_fraction)

    def schedule(step: jax.Array) -> jax.Array:
        warmup = jnp.minimum(1.0, (step + 1) / max(warmup_steps, 1)) if warmup_steps else 1.0
        done = jnp.clip((step - start) / max(num_steps - start, 1), 0.0, 1.0)
        if name == "constant":
            shape = jnp.ones_like(done)
        else:
            shape = 0.5 * (1.0 + jnp.cos(jnp.pi * done)) if name == "cosine" else 1.0 - done
        return jnp.asarray(peak * warmup * shape, jnp.float32)

    return schedule


def decay_start(name: ScheduleName, warmup_steps: int, num_steps: int, decay_fraction: float | None) -> int:
    """The step at which the learning rate begins to decay."""
    if name != "wsd":
        return warmup_steps
    assert decay_fraction is not None
    return max(warmup_steps, num_steps - max(1, round(decay_fraction * num_steps)))
