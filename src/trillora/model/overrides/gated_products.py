"""An activation times another array, as in a gated MLP, with one rule for both gradients, on TPUs.

    h = act(g) * u        dg = act'(g) * u * dh        du = act(g) * dh

By the rules of its two operators, XLA computes only one of the gradients where it computes dh, and the other in a pass
of its own over wide arrays. By one rule, both are a part of the matmul that gives dh.

The model's code multiplies after it has called the activation. So the activation leaves a note in the trace, and the
operator for matmuls looks for it, as in `sums`. XLA leaves out the output of the activation if nothing else uses it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from trillora.model.trace import Activated, current

Activation = Callable[[jax.Array], jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(activation: Activation, g: jax.Array, u: jax.Array) -> jax.Array:
    return activation(g) * u


def _forward(activation: Activation, g: jax.Array, u: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return activation(g) * u, (g, u)


def _backward(activation: Activation, saved: tuple[jax.Array, jax.Array], dh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """In float32, rounded once."""
    wide_g, wide_u, wide_dh = (array.astype(jnp.promote_types(array.dtype, jnp.float32)) for array in (*saved, dh))
    activated, pull_back = jax.vjp(activation, wide_g)
    (dg,) = pull_back(wide_u * wide_dh)
    return dg.astype(saved[0].dtype), (activated * wide_dh).astype(saved[1].dtype)


gated.defvjp(_forward, _backward)


def noted_activation(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """An implementation of an activation that leaves a note."""

    @functools.wraps(function)
    def wrapped(g: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        output, trace = function(g, *args, **kwargs), current()
        if trace is not None and trace.attention == "splash":
            trace.activated[id(output)] = Activated(output, g, lambda x: function(x, *args, **kwargs))
        return output

    return wrapped


def products_with_activations(function: Callable[..., object]) -> Callable[..., object]:
    """An implementation of the operator `mul` that looks for notes of activations."""

    @functools.wraps(function)
    def wrapped(x: object, y: object, *args: object, **kwargs: object) -> object:
        trace = current()
        if trace is not None and trace.activated and not args and not kwargs and not trace.no_grad_depth:
            for one, other in ((x, y), (y, x)):
                found = trace.activated.get(id(one))
                if found is not None and _is_alike(found.output, other):
                    return gated(found.activation, found.g, other)
        return function(x, y, *args, **kwargs)

    return wrapped


def _is_alike(output: jax.Array, other: object) -> bool:
    return isinstance(other, jax.Array) and (output.shape, output.dtype) == (other.shape, other.dtype)
