"""The layout of weights in memory: a flat dict of arrays, whose keys say which parameters of the model they contain.

A key is the name of a parameter (`model.norm.weight`) or, where equal layers are stacked for a scan, that name with a
slice in place of the layer number: `model.layers.1:18:6.mlp.up_proj.weight` contains layers 1, 7 and 13 along a new
leading dim. Base weights, adapters and shardings use these keys. A quantized weight is several arrays, such as
`….weight_q` and `….weight_scale` (`model.quantized`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trillora.engine.quantize import Format, item_bytes


@dataclass(frozen=True)
class Leaf:
    """One array of the tree, which contains one parameter or several stacked ones."""

    names: tuple[str, ...]  # of the parameters: one, or one per stacked layer
    stacked: bool
    shape: tuple[int, ...]  # with the stacked dim
    dtype: np.dtype[Any]
    quantized: QuantizedPart | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one parameter."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def num_bytes(self) -> int:
        return math.ceil(math.prod(self.shape) * item_bytes(self.dtype))


@dataclass(frozen=True)
class QuantizedPart:
    """What a leaf has to do with the weight that it belongs to."""

    name: str  # of the part, such as "q" or "scale"
    format: Format
    key: str  # of the weight
    weight: Leaf  # as the checkpoint stores it
    inputs_first: bool  # the stored weight is transposed (Conv1D)


Layout = dict[str, Leaf]
Tree = dict[str, Any]  # key -> jax.Array (or a jax.ShapeDtypeStruct where only shapes are known)


def stored_weights(layout: Layout) -> dict[str, tuple[Leaf, Layout]]:
    """Each weight as the checkpoint stores it, and the leaves that hold it: itself, or its parts if it is quantized."""
    weights: dict[str, tuple[Leaf, Layout]] = {}
    for key, leaf in layout.items():
        part = leaf.quantized
        _, held = weights.setdefault(part.key if part else key, (part.weight if part else leaf, {}))
        held[key] = leaf
    return weights


def unstack(tree: Tree, layout: Layout) -> Tree:
    """The same weights by parameter name, one array per layer."""
    flat: Tree = {}
    for key, array in tree.items():
        leaf = layout[key]
        for i, name in enumerate(leaf.names):
            flat[name] = array[i] if leaf.stacked else array
    return flat


def split_layers(tree: Tree, layout: Layout) -> Tree:
    """`unstack` inside a program that is differentiated: the gradient of a stacked array is one concatenation. Indexing
    would give a sum of arrays of the whole size, one for each layer."""
    flat: Tree = {}
    for key, array in tree.items():
        leaf = layout[key]
        flat |= dict(zip(leaf.names, _parts(array) if leaf.stacked else (array,), strict=True))
    return flat


@jax.custom_vjp
def _parts(array: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(array[i] for i in range(len(array)))


_parts.defvjp(lambda array: (_parts(array), None), lambda _, gradients: (jnp.stack(gradients),))


def stack(flat: Tree, layout: Layout) -> Tree:
    """The inverse of `unstack`, on the host: a program for every shape would take longer to compile."""
    return {
        key: jax.device_put(np.stack([flat[name] for name in leaf.names]) if leaf.stacked else flat[leaf.names[0]])
        for key, leaf in layout.items()
    }
