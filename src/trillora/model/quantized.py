"""Linear layers with a quantized weight.

A layer keeps its parameter `weight` [E, D] on the meta device, for its shape and type, but the model's tree has other
leaves in its place. With int8, `q_proj.weight` becomes

    q_proj.weight_q      int8     [E, D]
    q_proj.weight_scale  float32  [E]

They are stacked, sharded and passed to the layer like any weight. The layer's class becomes a subclass of its own
class: a plain linear layer multiplies by the codes (`engine.quantize.linear`, or `rounded_linear` if matmuls are in
the format of the codes). Any other code that reads `layer.weight` (a subclass of Linear with its own forward, Mamba's
time step, DoRA) gets the dequantized weight.

Codes always have outputs first, also for a Conv1D, whose weight is [D, E]. Legend: E outputs, D inputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torchax import interop
from transformers.pytorch_utils import Conv1D

from trillora.engine.quantize import Format, Parts, dequantize, part_names, shapes
from trillora.errors import TrilloraError
from trillora.model.layout import Layout, Leaf, QuantizedPart, Tree

Product = Callable[[jax.Array, Parts, jax.Array | None], jax.Array]
WEIGHT = "weight_"  # + the name of a part: the buffers that hold the parts


class _QuantizedWeight:
    """A mixin for linear layers: reading `weight` gives the dequantized weight. Without parts, when shapes are needed
    or the module is called as ordinary PyTorch, it gives the parameter."""

    _parameters: dict[str, Any]
    _buffers: dict[str, Any]

    @property
    def weight(self) -> torch.Tensor:
        parameter: torch.Tensor = self._parameters["weight"]
        parts = self._parts()
        if parts is None:
            return parameter
        inputs_first = isinstance(self, Conv1D)
        weight = dequantize(parts, parameter.shape[0 if inputs_first else 1])
        dtype = str(parameter.dtype).removeprefix("torch.")
        return interop.torch_view((weight.T if inputs_first else weight).astype(dtype))

    def _parts(self) -> Parts | None:
        parts = {name.removeprefix(WEIGHT): t for name, t in self._buffers.items() if name.startswith(WEIGHT)}
        return None if None in parts.values() else {name: interop.jax_view(t) for name, t in parts.items()}


class _QuantizedProduct(_QuantizedWeight):
    """For layers that compute `x @ weight.T + bias` and nothing else."""

    bias: torch.Tensor | None
    product: Product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._parts()
        if parts is None:
            return super().forward(x)  # type: ignore[misc]
        bias = None if self.bias is None else interop.jax_view(self.bias)
        return interop.torch_view(self.product(interop.jax_view(x), parts, bias))


@functools.cache
def _with_codes(cls: Any, product: Product) -> type:
    mixin = _QuantizedProduct if cls in (torch.nn.Linear, Conv1D) else _QuantizedWeight
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__, "product": staticmethod(product)})


def quantize_layers(
    model: torch.nn.Module, layers: Mapping[str, Any], within: str, format: Format, product: Product
) -> set[str]:
    """Prepares the linear layers below the module `within` (the decoder layers) and returns the names of their weights.
    A weight that several layers share stays as it is. `product` multiplies by the codes."""
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    chosen = {
        name: module
        for name, module in layers.items()
        if within and name.startswith(f"{within}.") and uses[id(module.weight)] == 1
    }
    if not chosen:
        raise TrilloraError(
            f"{type(model).__name__} has no linear layers that can be quantized.",
            where="model.quantize",
            do="use model.quantize=none",
        )
    for module in chosen.values():
        for part in part_names(format):
            module.register_buffer(WEIGHT + part, None, persistent=False)  # the array comes with each call
        cls: Any = type(module)
        module.__class__ = _with_codes(cls, product)
    return {f"{name}.weight" for name in chosen}


def part_leaves(key: str, weight: Leaf, format: Format, *, inputs_first: bool) -> Layout:
    """The leaves that replace the leaf of a weight."""
    shape = weight.part_shape[::-1] if inputs_first else weight.part_shape
    leaves = {}
    for part, array in shapes(shape[0], shape[1], format).items():
        names = tuple(f"{name}_{part}" for name in weight.names)
        stacked = (len(names), *array.shape) if weight.stacked else array.shape
        about = QuantizedPart(part, format, key, weight, inputs_first)
        leaves[f"{key}_{part}"] = Leaf(names, weight.stacked, stacked, np.dtype(array.dtype), about)
    return leaves


def whole_weight(arrays: Tree, parts: Layout) -> jax.Array:
    """A weight as the checkpoint stores it, from its array or from the parts of its quantized form."""
    about = next(iter(parts.values())).quantized
    if about is None:
        return next(iter(arrays.values()))
    codes = {leaf.quantized.name: arrays[key] for key, leaf in parts.items() if leaf.quantized}
    # One program. Outside a trace, each of its operations would be compiled by itself.
    weight = jax.jit(dequantize, static_argnums=1)(codes, about.weight.part_shape[0 if about.inputs_first else 1])
    return weight.T if about.inputs_first else weight
