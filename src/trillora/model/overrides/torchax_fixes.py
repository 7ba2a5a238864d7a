"""Fixes for operators where torchax differs from PyTorch. Each fix says what goes wrong without it.

They are applied once, to torchax's default environment and tensor classes. A fix has no effect if torchax is correct.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax
from torchax import interop
from torchax.tensor import Environment, Tensor
from torchax.view import View

from trillora.model.overrides.gated_products import noted_activation, products_with_activations
from trillora.model.overrides.sums import added_in_products
from trillora.model.trace import Replacement, current

TORCHAX_TENSORS = (Tensor, View)

# Operators that may combine a float32 scalar tensor with a bfloat16 array.
_PROMOTING = frozenset(
    f"aten.{name}"
    for name in (
        *("add", "add.Tensor", "sub", "sub.Tensor", "rsub.Tensor", "mul", "mul.Tensor", "div", "div.Tensor"),
        *("true_divide", "maximum", "minimum", "where", "where.self", "pow.Tensor_Tensor"),
    )
)

# Operators of several steps that PyTorch computes in float32 internally and rounds to bfloat16 once.
_ACTIVATIONS = frozenset(f"aten.{name}" for name in ("gelu", "silu", "silu.default"))
_ROUNDED_ONCE = _ACTIVATIONS | {
    f"aten.{name}" for name in ("native_layer_norm", "_softmax", "softmax", "softmax.int", "_log_softmax")
}


@functools.cache
def environment() -> Environment:
    """torchax's environment with the fixes applied."""
    env = torchax.default_env()
    for cls in TORCHAX_TENSORS:
        cls.type_as = _type_as
        cls.copy_ = _copy_
    for function, operator in list(env._ops.items()):
        if operator.is_jax_function:
            fixed = _stops_without_grad(_fixed(function, operator.func))
            env._ops[function] = dataclasses.replace(operator, func=fixed)
    return env


def _fixed(function: object, implementation: Callable[..., jax.Array]) -> Callable[..., object]:
    """torchax's implementation of an operator, or ours."""
    name = str(function)
    if name in _PROMOTING:
        promoted = _scalars_do_not_promote(implementation)
        if name in ("aten.mul", "aten.mul.Tensor"):
            return products_with_activations(promoted)
        return added_in_products(promoted) if name in ("aten.add", "aten.add.Tensor") else promoted
    if name in _ROUNDED_ONCE:
        rounded = _rounded_once(implementation)
        return noted_activation(rounded) if name in _ACTIVATIONS else rounded
    if function is torch.nn.functional.linear or name == "aten.linear":
        return _linear
    return _addmm if name == "aten.addmm" else implementation


def _stops_without_grad(function: Callable[..., object]) -> Callable[..., object]:
    """torchax ignores `torch.no_grad`: gradients would flow where PyTorch has none."""

    @functools.wraps(function)
    def wrapped(*args: object, **kwargs: object) -> object:
        out = function(*args, **kwargs)
        return without_gradient(out) if in_no_grad() else out

    return wrapped


def in_no_grad() -> bool:
    """Whether the model's code is inside `torch.no_grad`. `torch.is_grad_enabled` would also be false in the forward of
    a `torch.autograd.Function`, through which gradients do flow."""
    trace = current()
    return trace is not None and trace.no_grad_depth > 0


def fused_input(*args: object, **kwargs: object) -> jax.Array | None:
    """The only argument of a call that fused kernels may compute; None if they are off, or if it is another call."""
    trace, is_usual = current(), len(args) == 1 and not kwargs and isinstance(args[0], TORCHAX_TENSORS)
    if trace is None or trace.kernels != "fused" or not is_usual or in_no_grad():
        return None
    x: jax.Array = interop.jax_view(args[0])
    return x


def counted_no_grad() -> list[Replacement]:
    """Replacements (class, name, value) that count how many `torch.no_grad` the current trace is in."""
    enter, leave = torch.no_grad.__enter__, torch.no_grad.__exit__

    def count(change: int) -> None:
        if (trace := current()) is not None:
            trace.no_grad_depth += change

    def counted_enter(self: torch.Tensor) -> None:
        count(1)
        enter(self)

    def counted_leave(self: object, *args: object) -> None:
        count(-1)
        leave(self, *args)

    return [(torch.no_grad, "__enter__", counted_enter), (torch.no_grad, "__exit__", counted_leave)]


def without_gradient(tree: object) -> Any:
    """The same values, as constants."""
    return jax.tree.map(lambda leaf: jax.lax.stop_gradient(leaf) if isinstance(leaf, jax.Array) else leaf, tree)


def _type_as(self: torch.Tensor, other: torch.Tensor) -> Any:
    """torchax casts in place: this changes the caller's tensor and fails on views."""
    return self.to(other.dtype)


def _copy_(self: torch.Tensor, source: Any, non_blocking: bool = False) -> Any:
    """torchax's `copy_` fails when the source is a view."""
    value = source.jax() if isinstance(source, TORCHAX_TENSORS) else jnp.asarray(source.numpy())
    target = self.jax()
    value = jnp.broadcast_to(value, target.shape).astype(target.dtype)
    if isinstance(self, View):
        self.update(value)
    else:
        self._elem = value
    return self


def _scalars_do_not_promote(function: Callable[..., object]) -> Callable[..., object]:
    """In PyTorch bfloat16[n] * float32[] is bfloat16. jnp promotes it to float32, so a bfloat16 model would silently
    run in float32 after its first scaled embedding."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        arrays = [a for a in args if isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jnp.floating)]
        wide = [a.dtype for a in arrays if a.ndim > 0]
        if wide and len(wide) < len(arrays):
            dtype = functools.reduce(jnp.promote_types, wide)
            args = tuple(a.astype(dtype) if any(a is s for s in arrays) and a.ndim == 0 else a for a in args)
        return function(*args, **kwargs)

    return wrapped


def _rounded_once(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """torchax rounds after every step inside the operator, which gives larger errors than PyTorch."""

    @functools.wraps(function)
    def wrapped(first: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        def widen(value: object) -> Any:
            return value.astype(jnp.float32) if isinstance(value, jax.Array) and value.dtype == jnp.bfloat16 else value

        out = function(widen(first), *(widen(a) for a in args), **{name: widen(a) for name, a in kwargs.items()})
        if first.dtype != jnp.bfloat16:
            return out
        rounded: jax.Array = jax.tree.map(lambda o: o.astype(first.dtype), out)
        return rounded

    return wrapped


def _linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """PyTorch adds the bias before it rounds the matmul, torchax after."""
    if bias is None:
        return jnp.einsum("...a,ba->...b", x, weight)
    product = jnp.einsum("...a,ba->...b", x, weight, preferred_element_type=jnp.float32)
    return (product + bias).astype(jnp.promote_types(x.dtype, weight.dtype))


def _addmm(bias: jax.Array, a: jax.Array, b: jax.Array, *, beta: float = 1.0, alpha: float = 1.0) -> jax.Array:
    """Like `_linear`; used by Conv1D."""
    product = jnp.matmul(a, b, preferred_element_type=jnp.float32)
    return (beta * bias + alpha * product).astype(jnp.promote_types(a.dtype, b.dtype))
