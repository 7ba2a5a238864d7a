"""Calls of Pallas kernels for Triton, shared by the kernels for NVIDIA GPUs.

    shape = jax.ShapeDtypeStruct((1024, 64), jnp.bfloat16)
    y = call(kernel, shape, (16,), name="twice", num_warps=4)(x)

runs `kernel(x_ref, y_ref)` 16 times. Triton is imported when it is needed: a later jax may not have it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from jax.experimental import pallas as pl

LARGEST = 2**31  # numbers of an array: places are computed in 32 bits


def has_triton() -> bool:
    """Whether this jax has Pallas for Triton, whose removal jax 0.11 announces."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def call(
    kernel: Any,
    out_shape: Any,
    grid: tuple[int, ...],
    *,
    name: str,
    num_warps: int,
    num_stages: int = 2,
    interpret: bool = False,
    aliases: Mapping[int, int] | None = None,
) -> Any:
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


def masked_load(ref: Any, mask: Any, other: float = 0.0) -> Any:
    from jax.experimental.pallas import triton

    return triton.load(ref, mask=mask, other=other)


def masked_store(ref: Any, value: Any, mask: Any) -> None:
    from jax.experimental.pallas import triton

    triton.store(ref, value.astype(ref.dtype), mask=mask)
