"""Loss and its gradient from logits, in one kernel for NVIDIA GPUs (Pallas for Triton).

    loss of a token     log(sum(exp(logits))) - logits[target]
    its gradient        weight * (softmax(logits) - (1 at the target, else 0))

XLA reads the logits four times: for the largest, for the sum, for the target's, and for the gradient. Here one program
reads its row twice, and the gradient takes the place of the logits in memory. The sum is computed with the largest
logit so far, and corrected when a larger one comes. Each thread does that for its own columns, a group of up to 8 in
every block, so that threads do not wait for each other before the row ends. `Kernel("xla")` is the same in plain jax.

    row of 24 logits, blocks of 16, groups of 8:    [0 … 7] [8 … 15]    [16 … 23] -

Legend: M tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from trillora.engine.kernels.triton_call import LARGEST, LOG2_E, call, functions, masked_load, masked_store

GROUP = 8  # logits that a thread reads at once: 16 bytes
MOST_GROUPS = 4096  # of a block: each has a largest logit and a sum in registers
WIDE = 65536  # columns from which the larger blocks are faster on an H200


class Kernel(NamedTuple):
    name: Literal["xla", "triton"] = "xla"
    interpret: bool = False  # run it in the Pallas interpreter
    columns: int | None = None  # of a block; None: what is fastest for the vocabulary


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
    group = math.gcd(num_columns, GROUP)
    columns = kernel.columns or (32768 if num_columns > WIDE else 8192)
    columns = min(columns, MOST_GROUPS * group, pl.next_power_of_2(num_columns))
    logits = logits_MV.reshape(num_rows, -1, group)
    shapes = (jax.ShapeDtypeStruct((num_rows,), jnp.float32), jax.ShapeDtypeStruct(logits.shape, logits.dtype))
    body = functools.partial(_kernel, num_groups=columns // group, exp2=functions(interpret=kernel.interpret).exp2)
    run = call(
        body,
        shapes,
        (num_rows,),
        name="loss_and_gradient",
        num_warps=32 if num_columns > WIDE else 16,
        interpret=kernel.interpret,
        aliases={0: 1},
    )
    losses, gradient = run(logits, targets_M, weights_M)
    return Result(losses, gradient.reshape(logits_MV.shape))


def _kernel(
    logits_ref: jax.Ref,
    targets_ref: jax.Ref,
    weights_ref: jax.Ref,
    loss_ref: jax.Ref,
    gradient_ref: jax.Ref,
    *,
    num_groups: int,
    exp2: Callable[[jax.Array], jax.Array],
) -> None:
    """One row, in blocks of groups."""
    row, (_, width, group) = pl.program_id(0), logits_ref.shape
    groups, places = jnp.arange(num_groups, dtype=jnp.int32)[:, None], jnp.arange(group, dtype=jnp.int32)[None, :]
    target, weight = targets_ref[row], weights_ref[row]
    target_logit = logits_ref[row, target // group, target % group].astype(jnp.float32)
    num_blocks = pl.cdiv(width, num_groups)

    def block(i: jax.Array) -> tuple[tuple[jax.Array, slice | pl.Slice, slice | pl.Slice], jax.Array, jax.Array]:
        """The place of a block, which groups exist, and the logits in base 2; minus infinity beyond the last one."""
        place = (row, pl.ds(i * num_groups, num_groups), pl.ds(0, group))
        exists = jnp.broadcast_to(i * num_groups + groups < width, (num_groups, group))
        return place, exists, masked_load(logits_ref.at[place], exists, -jnp.inf).astype(jnp.float32) * LOG2_E

    def add(i: jax.Array, sums: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        largest, partial = sums
        _, _, logits = block(i)
        new = jnp.maximum(largest, logits.max(axis=1))
        return new, partial * exp2(largest - new) + exp2(logits - new[:, None]).sum(axis=1)

    # The start is finite, so that the first correction is zero.
    start = (jnp.full(num_groups, -1e30, jnp.float32), jnp.zeros(num_groups, jnp.float32))
    each, partial = jax.lax.fori_loop(0, num_blocks, add, start)
    largest = each.max()
    log_sum = largest + jnp.log2((partial * exp2(each - largest)).sum())
    loss_ref[row] = log_sum * (1 / LOG2_E) - target_logit

    def write(i: jax.Array, nothing: None) -> None:
        """The last block first, because some of it may still be in a cache: 0.5 % faster on an H200."""
        i = num_blocks - 1 - i
        place, exists, logits = block(i)
        is_target = (i * num_groups + groups) * group + places == target
        masked_store(gradient_ref.at[place], (exp2(logits - log_sum) - is_target) * weight, exists)

    jax.lax.fori_loop(0, num_blocks, write, None)
