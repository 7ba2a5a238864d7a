"""Loss and its gradient from logits, in one kernel for NVIDIA GPUs (Pallas for Triton).

    loss of a token     log(sum(exp(logits))) - logits[target]
    its gradient        weight * (softmax(logits) - (1 at the target, else 0))

XLA reads the logits four times: for the largest, for the sum, for the target's, and for the gradient. Here one program
reads its row twice, and the gradient takes the place of the logits in memory. The sum is computed with the largest
logit so far, and corrected when a larger one comes. `Kernel("xla")` is the same in plain jax.

Legend: M tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from trillora.engine.kernels.triton_call import LARGEST, call, masked_load, masked_store

LOG2_E = 1 / math.log(2)  # GPUs compute powers of 2


class Kernel(NamedTuple):
    name: Literal["xla", "triton"] = "xla"
    interpret: bool = False  # run it in the Pallas interpreter
    columns: int = 16384  # of a block
    num_warps: int = 32


PLAIN = Kernel()


class Result(NamedTuple):
    losses: jax.Array  # float32
    gradient: jax.Array  # of the weighted loss, with the logits' dtype


def loss_and_gradient(logits: jax.Array, targets: jax.Array, weights: jax.Array, kernel: Kernel) -> Result:
    """Of logits [..., V], with any dimensions before."""
    if kernel.name == "xla" or logits.size >= LARGEST:
        return _reference(logits, targets, weights)
    rows = (logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), weights.reshape(-1).astype(jnp.float32))
    losses, gradient = _call(*rows, kernel)
    return Result(losses.reshape(targets.shape), gradient.reshape(logits.shape))


def _reference(given: jax.Array, targets: jax.Array, weights: jax.Array) -> Result:
    logits = given.astype(jnp.float32)
    log_sum = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    is_target = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1) == targets[..., None]
    losses = log_sum[..., 0] - jnp.where(is_target, logits, 0.0).sum(-1)
    error = (jnp.exp(logits - log_sum) - is_target) * weights[..., None]
    return Result(losses, error.astype(given.dtype))


def _call(logits_MV: jax.Array, targets_M: jax.Array, weights_M: jax.Array, kernel: Kernel) -> Result:
    num_rows, num_columns = logits_MV.shape
    columns = min(kernel.columns, pl.next_power_of_2(num_columns))
    shapes = (jax.ShapeDtypeStruct((num_rows,), jnp.float32), jax.ShapeDtypeStruct(logits_MV.shape, logits_MV.dtype))
    body = functools.partial(_kernel, columns=columns, width=num_columns)
    run = call(
        body,
        shapes,
        (num_rows,),
        name="loss_and_gradient",
        num_warps=kernel.num_warps,
        interpret=kernel.interpret,
        aliases={0: 1},
    )
    return Result(*run(logits_MV, targets_M, weights_M))


def _kernel(
    logits_ref: Any, targets_ref: Any, weights_ref: Any, loss_ref: Any, gradient_ref: Any, *, columns: int, width: int
) -> None:
    """One row, in blocks of columns."""
    row, num_blocks, offsets = pl.program_id(0), pl.cdiv(width, columns), jnp.arange(columns, dtype=jnp.int32)
    target, weight = targets_ref[row], weights_ref[row]
    target_logit = logits_ref[row, target].astype(jnp.float32)

    def block(i: Any) -> tuple[Any, jax.Array, jax.Array]:
        """The place of a block, which columns exist, and the logits in base 2; minus infinity beyond the last one."""
        place, is_column = (row, pl.ds(i * columns, columns)), i * columns + offsets < width
        return place, is_column, masked_load(logits_ref.at[place], is_column, -jnp.inf).astype(jnp.float32) * LOG2_E

    def add(i: Any, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest, partial = sums
        _, _, logits = block(i)
        new = jnp.maximum(largest, logits.max())
        return new, partial * jnp.exp2(largest - new) + jnp.exp2(logits - new)

    start = (jnp.float32(-1e30), jnp.zeros(columns, jnp.float32))  # finite, so that the first correction is zero
    largest, partial = jax.lax.fori_loop(0, num_blocks, add, start)
    log_sum = largest + jnp.log2(partial.sum())
    loss_ref[row] = log_sum * (1 / LOG2_E) - target_logit

    def write(i: Any, nothing: None) -> None:
        place, is_column, logits = block(i)
        is_target = i * columns + offsets == target
        masked_store(gradient_ref.at[place], (jnp.exp2(logits - log_sum) - is_target) * weight, is_column)

    jax.lax.fori_loop(0, num_blocks, write, None)
