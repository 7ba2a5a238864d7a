"""Calls of Pallas kernels for Triton, shared by the kernels for NVIDIA GPUs.

    shape = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)
    y = call(kernel, shape, (16,), name="twice", num_warps=4)(x)

runs `kernel(x_ref, y_ref)` 16 times. jax 0.11 and later call Pallas for Triton deprecated. It is imported when it is
needed, and `has_triton` looks for every name that is used: without one, steps are built from XLA's own kernels, which
are slower and compute the same.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from trillora.engine.types import Pytree

LARGEST = 2**31  # numbers of an array: places are computed in 32 bits
LOG2_E = 1 / math.log(2)  # GPUs compute powers of 2


NAMES = ("CompilerParams", "elementwise_inline_asm", "load", "store")  # that the kernels use


@functools.cache
def has_triton() -> bool:
    """Whether this jax has all of Pallas for Triton that the kernels use."""
    try:
        triton = importlib.import_module("jax.experimental.pallas.triton")
    except ImportError:
        return False
    return all(hasattr(triton, name) for name in NAMES)


def call(
    kernel: Callable[..., None],
    out_shape: Pytree,
    grid: tuple[int, ...],
    *,
    name: str,
    num_warps: int,
    num_stages: int = 2,
    interpret: bool = False,
    aliases: Mapping[int, int] | None = None,
) -> Callable[..., Pytree]:
    """`name` is seen in profiles. `aliases`: numbers of inputs, and of the outputs that take their memory."""
    from jax.experimental.pallas import triton

    return pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        name=name,
        compiler_params=triton.CompilerParams(num_warps=num_warps, num_stages=num_stages),
        interpret=interpret,
        input_output_aliases=dict(aliases or {}),
    )


class Functions(NamedTuple):
    """Functions of float32 in kernels."""

    exp2: Callable[[jax.Array], jax.Array]
    reciprocal: Callable[[jax.Array], jax.Array]

    def sigmoid(self, x: jax.Array) -> jax.Array:
        return self.reciprocal(1 + self.exp2(x * -LOG2_E))


IN_JAX = Functions(jnp.exp2, lambda x: 1 / x)


def functions(*, interpret: bool = False) -> Functions:
    """Each is one instruction of the GPU, exact to 2e-7. What Triton makes of jax's own takes several more, for results
    below 1e-38, which are zero here."""
    if interpret:
        return IN_JAX
    return Functions(*(lambda x, name=name: _instruction(name, x) for name in ("ex2", "rcp")))


def _instruction(name: str, x: jax.Array) -> jax.Array:
    from jax.experimental.pallas import triton

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    code, registers = f"{name}.approx.ftz.f32 $0, $1;", "=f,f"
    [y] = triton.elementwise_inline_asm(code, args=[x], constraints=registers, pack=1, result_shape_dtypes=[shape])
    return y


def masked_load(ref: Any, mask: jax.Array, other: float = 0.0) -> jax.Array:
    from jax.experimental.pallas import triton

    return triton.load(ref, mask=mask, other=other)


def masked_store(ref: Any, value: jax.Array, mask: jax.Array | None) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref, value.astype(ref.dtype), mask=mask)
