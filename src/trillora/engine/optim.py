"""Optimisers and schedules. An optimiser here gives a direction; the step scales it by the learning rate of its own
number, which a skipped update does not hold back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

OptimizerName = Literal["adamw", "lion"]
ScheduleName = Literal["constant", "linear", "cosine"]
Schedule = Callable[[jax.Array], jax.Array]


def make_optimizer(name: OptimizerName, weight_decay: float) -> optax.GradientTransformation:
    """Decoupled weight decay, as in the papers; PyTorch's defaults for everything else."""
    direction = {"adamw": optax.scale_by_adam, "lion": optax.scale_by_lion}[name]()
    return optax.chain(direction, optax.add_decayed_weights(weight_decay)) if weight_decay else direction


def make_schedule(name: ScheduleName, peak: float, warmup_steps: int, num_steps: int) -> Schedule:
    """Linear warm-up that ends at `peak`; then constant, or down to zero after the last step."""

    def schedule(step: jax.Array) -> jax.Array:
        warmup = jnp.minimum(1.0, (step + 1) / max(warmup_steps, 1)) if warmup_steps else 1.0
        done = jnp.clip((step - warmup_steps) / max(num_steps - warmup_steps, 1), 0.0, 1.0)
        if name == "constant":
            shape = jnp.ones_like(done)
        else:
            shape = 1.0 - done if name == "linear" else 0.5 * (1.0 + jnp.cos(jnp.pi * done))
        return jnp.asarray(peak * warmup * shape, jnp.float32)

    return schedule
