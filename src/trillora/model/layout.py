"""How weights lie in memory: a flat dict of arrays whose keys say which checkpoint parameters each one holds.

A key is a parameter's own name (`model.norm.weight`) or, where equal layers are stacked for a scan, that name with
the layer number replaced by a slice: `model.layers.1:18:6.mlp.up_proj.weight` holds layers 1, 7 and 13 along a new
leading dim. Base weights, adapters, shardings and files all speak of these keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np


@dataclass(frozen=True)
class Leaf:
    """One array of the tree: which parameters it holds, its shape there (stacked dim included) and its type."""

    names: tuple[str, ...]  # one per repetition; a single one when not stacked
    stacked: bool
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of one of the parameters it holds."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Layout = dict[str, Leaf]
Tree = dict[str, Any]  # key -> jax.Array (or a jax.ShapeDtypeStruct where only shapes are known)


def unstack(tree: Tree, layout: Layout) -> Tree:
    """The same arrays under their own parameter names, one per layer."""
    flat: Tree = {}
    for key, array in tree.items():
        leaf = layout[key]
        for i, name in enumerate(leaf.names):
            flat[name] = array[i] if leaf.stacked else array
    return flat


def stack(flat: Tree, layout: Layout) -> Tree:
    """The inverse of `unstack`."""
    return {
        key: jax.numpy.stack([flat[name] for name in leaf.names]) if leaf.stacked else flat[leaf.names[0]]
        for key, leaf in layout.items()
    }
