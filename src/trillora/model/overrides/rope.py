"""Rotary frequencies that depend on the length of a text, without branches on values.

`dynamic` frequencies read the largest position. They have no effect on sequences up to the trained length, and longer
ones are refused before a run (`limits.check_rows`), so they become `default`.

`longrope` has two sets of frequencies: if the largest position of the batch is beyond the trained length, all tokens
use the long ones. Older versions of transformers choose with a Python `if`, which cannot be traced: here it is a
selection between two arrays.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax import interop
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import Replacement


@dataclass(frozen=True)
class _LongRope:
    """The frequencies of one kind of layers."""

    buffer: str
    trained_length: int
    short: np.ndarray
    long: np.ndarray


def make_rope_static(module: torch.nn.Module) -> None:
    """Changes the rotary embeddings of a model."""
    for child in module.modules():
        rope: Any = child.__dict__.get("rope_type")
        if rope is None:
            continue
        kinds = rope if isinstance(rope, dict) else {None: rope}
        long = {layer: _long_rope(child, layer) for layer, kind in kinds.items() if kind == "longrope"}
        static = {layer: "default" if layer in long or "dynamic" in kind else kind for layer, kind in kinds.items()}
        child.__dict__["rope_type"] = static if isinstance(rope, dict) else static[None]
        if long:
            child.__dict__["forward"] = functools.partial(_forward, child, child.forward, long)


def _long_rope(child: Any, layer: str | None) -> _LongRope:
    parameters = child.config.rope_parameters if layer is None else child.config.rope_parameters[layer]
    trained = parameters["original_max_position_embeddings"]
    options = {} if layer is None else {"layer_type": layer}
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](child.config, torch.device("cpu"), seq_len=trained + 1, **options)
    buffer = "inv_freq" if layer is None else f"{layer}_inv_freq"
    return _LongRope(buffer, trained, getattr(child, buffer).numpy().copy(), long.numpy())


def _forward(
    child: Any,
    forward: Callable[..., object],
    long: dict[str | None, _LongRope],
    x: torch.Tensor,
    position_ids: torch.Tensor,
    layer_type: str | None = None,
) -> Any:
    given = () if layer_type is None else (layer_type,)
    rope = long.get(layer_type)
    if rope is not None and isinstance(position_ids, TORCHAX_TENSORS):
        is_long = interop.jax_view(position_ids).max() >= rope.trained_length
        frequencies: jax.Array = jnp.where(is_long, rope.long, rope.short)
        child.register_buffer(rope.buffer, interop.torch_view(frequencies), persistent=False)
    return forward(x, position_ids, *given)


def rotations_as_products(module: torch.nn.Module) -> list[Replacement]:
    """For TPUs: replaces `rotate_half` of the model's code, [x1, x2] -> [-x2, x1], by a matmul with a matrix of zeros,
    ones and minus ones. It is exact, and one operation of the matrix unit, where halves of 64 lanes are copied."""
    return [(file, "rotate_half", functools.partial(_product, rotate)) for file, rotate in _rotations(module)]


def rotations_with_gradient(module: torch.nn.Module) -> list[Replacement]:
    """For GPUs: the gradient of `rotate_half` is written as a rotation too, which XLA computes in half the time of what
    it would derive: each half padded with zeros, and their sum."""
    sample, rotated = torch.arange(6.0), torch.tensor([-3.0, -4.0, -5.0, 0.0, 1.0, 2.0])
    return [
        (file, "rotate_half", functools.partial(_rotated, rotate))
        for file, rotate in _rotations(module)
        if torch.equal(rotate(sample), rotated)  # some models rotate neighbors
    ]


def _rotations(module: torch.nn.Module) -> list[tuple[Any, Callable[[torch.Tensor], torch.Tensor]]]:
    """The files of the model's code that have a function `rotate_half`, and the function."""
    files = {sys.modules[type(child).__module__] for child in module.modules()}
    return [(file, rotate) for file in files if (rotate := vars(file).get("rotate_half"))]


@jax.custom_vjp
def _rotate_half(x: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([-second, first], axis=-1)


_rotate_half.defvjp(lambda x: (_rotate_half(x), None), lambda _, gradient: (-_rotate_half(gradient),))


def _rotated(rotate: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, TORCHAX_TENSORS):
        return rotate(x)
    return interop.torch_view(_rotate_half(interop.jax_view(x)))


def _product(rotate: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    if not isinstance(x, TORCHAX_TENSORS) or x.dtype != torch.bfloat16:
        return rotate(x)
    with jax.ensure_compile_time_eval():
        matrix = interop.jax_view(rotate(interop.torch_view(jnp.eye(x.shape[-1], dtype=jnp.bfloat16))))
    return interop.torch_view(interop.jax_view(x) @ matrix)
