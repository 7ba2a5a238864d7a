"""The output of a linear layer plus the residual stream, as a part of the layer's matmuls, with fused kernels.

A decoder layer ends with `residual + down_proj(x)`, and its attention with `residual + o_proj(x)`. XLA would read both
again to add them. `engine.kernels.product_sum` adds the residual stream with the matmuls of the base and of LoRA:

    residual + x Wᵀ + low Bᵀ

The model's code has already called the layer when it adds the result. So the layer leaves a note in the trace
(`LinearSum`), and the operator for additions looks for it. The output that the layer has returned is left out by XLA if
nothing else uses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from trillora.model.trace import LinearSum, Trace, current


def output_with_note(computed: Callable[[jax.Array | None], jax.Array], name: str, trace: Trace) -> jax.Array:
    """What `computed` gives for no addend, with its name for remat policies. The sum with something else has that name
    too."""
    output: jax.Array = checkpoint_name(computed(None), name)
    trace.sums[id(output)] = LinearSum(output, lambda other: checkpoint_name(computed(other), name))
    return output


def added_in_products(function: Callable[..., object]) -> Callable[..., object]:
    """An implementation of the operator `add` that looks for notes of linear layers."""

    @functools.wraps(function)
    def wrapped(x: Any, y: Any, *args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is not None and trace.sums and not args and not kwargs and not trace.no_grad_depth:
            for one, other in ((x, y), (y, x)):
                found = trace.sums.get(id(other))
                if found is not None and (one.shape, one.dtype) == (found.output.shape, found.output.dtype):
                    return found.add_to(one)
        return function(x, y, *args, **kwargs)

    return wrapped
