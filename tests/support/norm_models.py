"""A small model with norms, and random weights for it."""

from __future__ import annotations

import zlib

import numpy as np

from trillora.model.layout import Layout, Tree, stack

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}


def random_tree(layout: Layout) -> Tree:
    """The same numbers for a name, however layers are stacked."""

    def numbers(name: str, shape: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        return generator.normal(size=shape).astype(np.float32)

    return stack({name: numbers(name, leaf.part_shape) for leaf in layout.values() for name in leaf.names}, layout)
