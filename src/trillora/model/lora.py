"""LoRA for any model: selects the linear layers to adapt, and adds the adapter to their output.

A target keeps its name and its frozen weight. It gets two parameters, `lora_a` [R, D] and `lora_b` [E, R], and returns

    y = linear(x) + scale * (dropout(x) @ lora_a.T) @ lora_b.T

Example: with rank 2, a layer `q_proj` with weight [4, 3] (E = 4 outputs, D = 3 inputs) gets `q_proj.lora_a` [2, 3] and
`q_proj.lora_b` [4, 2]. With alpha 8, scale is 8 / 2 = 4.

Legend: R rank, D inputs, E outputs.
"""

from __future__ import annotations

import fnmatch
import functools
import math
import re
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.ad_checkpoint import checkpoint_name
from torchax import interop
from transformers.pytorch_utils import Conv1D

from trillora.engine.hash_random import keep_mask
from trillora.errors import TrilloraError, nearest
from trillora.model.adapter_parameters import kind_of
from trillora.model.layout import Layout, Tree
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import current

ALL_LINEAR = "all-linear"
SAVED_NAME = "linear"  # the name of a linear layer's output in remat policies


@dataclass(frozen=True)
class LoraSpec:
    """The adapter's hyperparameters. `targets` is "all-linear", or names, dotted suffixes or patterns of linear layers.
    Dropout does not apply to an adapted head, which is called for each chunk of the loss."""

    rank: int = 16
    alpha: float = 32.0
    rslora: bool = False
    dropout: float = 0.0
    targets: str | tuple[str, ...] = ALL_LINEAR

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


class _LinearOutput:
    """A mixin for linear layers: names the output for remat policies, and adds the adapter if there is one.

    `add_lora` sets the class of an existing layer to a subclass of this and the layer's own class, so `super().forward`
    is the original layer, with its frozen weight. The attributes below exist only on adapted layers.
    """

    lora_a: torch.nn.Parameter
    lora_b: torch.nn.Parameter
    lora_scale: float
    lora_dropout: float
    lora_stream: int  # a number for the dropout key, different for each adapted projection of a layer

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = super().forward(x, *args, **kwargs)  # type: ignore[misc]
        if not isinstance(out, TORCHAX_TENSORS):  # called as ordinary PyTorch
            return out
        y = interop.jax_view(out)
        if hasattr(self, "lora_a"):
            if not torch.is_grad_enabled():
                raise TrilloraError(
                    "The forward pass of this model runs adapted layers under torch.no_grad.",
                    do="choose an architecture from docs/ARCHITECTURES.md: JAX would ignore no_grad",
                )
            a, b = interop.jax_view(self.lora_a), interop.jax_view(self.lora_b)
            y = y + self._lora_delta(interop.jax_view(x), a, b).astype(y.dtype)
        return interop.torch_view(checkpoint_name(y, SAVED_NAME))

    def _lora_delta(self, x: jax.Array, a_RD: jax.Array, b_ER: jax.Array) -> jax.Array:
        trace = current()
        if self.lora_dropout and trace is not None and trace.dropout_key is not None:
            key = trace.dropout_key.fold_in(self.lora_stream)
            kept = keep_mask(key, 1 - self.lora_dropout, x.shape)
            x = jnp.where(kept, x / (1 - self.lora_dropout), 0).astype(x.dtype)
        return (x @ a_RD.astype(x.dtype).T) @ b_ER.astype(x.dtype).T * self.lora_scale


@functools.cache
def _with_output(cls: Any) -> type:
    return type(cls.__name__, (_LinearOutput, cls), {"__module__": cls.__module__})


def add_lora(model: torch.nn.Module, spec: LoraSpec | None) -> list[str]:
    """Adds adapter parameters (on the meta device) to the targets of `spec`, and returns the targets' names."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    linear = linear_layers(model)
    targets = [] if spec is None else select_targets(model, list(linear), spec.targets)
    for name, module in linear.items():
        cls: Any = type(module)
        module.__class__ = _with_output(cls)
        if spec is None or name not in targets:
            continue
        num_in, num_out = features(module)
        module.lora_a = torch.nn.Parameter(torch.empty(spec.rank, num_in, device="meta"))
        module.lora_b = torch.nn.Parameter(torch.empty(num_out, spec.rank, device="meta"))
        module.lora_scale, module.lora_dropout = spec.scale, spec.dropout
        module.lora_stream = zlib.crc32(
            re.sub(r"\.\d+\.", ".#.", name).encode()
        )  # the same in all layers, which share one scan body; the dropout key already contains the layer
    return targets


def linear_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Every linear module that returns a single tensor. A router may subclass Linear and return a tuple: subclasses are
    called once on the meta device to find out."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | Conv1D) and _returns_one_tensor(module):
            found[name] = module
    return found


def _returns_one_tensor(module: Any) -> bool:
    if type(module) in (torch.nn.Linear, Conv1D):
        return True
    num_in, num_out = features(module)
    try:
        out = module(torch.empty(1, 2, num_in, device="meta", dtype=module.weight.dtype))
    except Exception:  # a subclass that cannot be called like Linear is not a plain linear layer
        return False
    return isinstance(out, torch.Tensor) and out.shape == (1, 2, num_out)


def features(module: Any) -> tuple[int, int]:
    """Numbers of inputs and outputs. Conv1D stores its weight transposed."""
    out_features, in_features = module.weight.shape
    return (out_features, in_features) if isinstance(module, Conv1D) else (in_features, out_features)


def select_targets(model: Any, linear: list[str], targets: str | tuple[str, ...]) -> list[str]:
    """Names of the linear layers that match. "all-linear" does not include the head."""
    if targets == ALL_LINEAR:
        head = model.get_output_embeddings()
        return [name for name in linear if model.get_submodule(name) is not head]
    chosen: set[str] = set()
    for i, target in enumerate((targets,) if isinstance(targets, str) else targets):
        matches = [name for name in linear if _matches(name, target)]
        if not matches:
            short = list(dict.fromkeys(name.rsplit(".", 1)[-1] for name in linear))
            guess = nearest(target, [*short, *linear])
            hint = f"did you mean {guess!r}? " if guess else ""
            raise TrilloraError(
                f"LoRA target {target!r} matches no linear layer of {type(model).__name__}.",
                where=f"lora.targets[{i}]",
                do=f"{hint}Linear layers here: {' '.join(short)}",
            )
        chosen.update(matches)
    return [name for name in linear if name in chosen]


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}") or fnmatch.fnmatchcase(name, target)


def initial_adapter(layout: Layout, seed: int) -> Tree:
    """A is Kaiming-uniform and B is zero, so the adapted model starts equal to the base. The numbers depend only on the
    seed and the parameter's name, so they do not change with the stacking of layers or the number of devices."""
    return {
        key: np.stack([_initial(name, leaf.part_shape, seed) for name in leaf.names]).reshape(leaf.shape)
        for key, leaf in layout.items()
    }


def _initial(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    if kind_of(name).is_zero_at_start:
        return np.zeros(shape, np.float32)
    bound = 1 / math.sqrt(shape[-1])  # kaiming_uniform_(a=sqrt(5)), PEFT's default
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    return generator.uniform(-bound, bound, shape).astype(np.float32)
