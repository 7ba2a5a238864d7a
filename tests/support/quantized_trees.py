"""Small trees of quantized weights."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import tiny_models
import torch
from architecture_checks import (
    to_jax,
)

from trillora.engine.quantize import dequantize, quantize
from trillora.model.bridge import CausalLM
from trillora.model.layout import Tree, stack, stored_weights

quantized = jax.jit(quantize, static_argnums=1)


dequantized = jax.jit(dequantize, static_argnums=1)


def matrix(rows: int, columns: int) -> np.ndarray:
    """A bell-shaped matrix of integer arithmetic, the same in every version of numpy; one block of it is zero."""
    n = np.arange(4 * rows * columns, dtype=np.uint64)
    u = (n * np.uint64(2654435761) + np.uint64(12345)) % np.uint64(2**32)
    u = (u ^ (u >> np.uint64(15))) * np.uint64(2246822519) % np.uint64(2**32)
    weight = ((u / 2**32 - 0.5).reshape(4, rows, columns).sum(0) * 0.05).astype(np.float32)
    weight[1, 64:128] = 0
    return weight


def with_dequantized_weights(name: str, ours: CausalLM) -> tuple[Any, dict[str, jax.Array]]:
    """PyTorch's model with dequantized weights, and our arrays by parameter name. Also the number of weights."""
    reference = tiny_models.build(name)
    flat = {n: to_jax(t) for n, t in (*reference.named_parameters(), *reference.named_buffers())}
    for leaf, parts in stored_weights(ours.layout).values():
        about = next(iter(parts.values())).quantized
        if about is None:
            continue
        for weight_name in leaf.names:
            parameter = reference.get_parameter(weight_name)
            weight = flat.pop(weight_name)
            weight = weight.T if about.inputs_first else weight
            arrays = quantized(weight, about.format)
            flat |= {f"{weight_name}_{part}": array for part, array in arrays.items()}
            whole = np.asarray(dequantized(arrays, weight.shape[1]))
            parameter.data = torch.tensor(whole.T if about.inputs_first else whole)
    return reference, flat


def tree_of(ours: CausalLM, flat: dict[str, jax.Array]) -> Tree:
    return stack({n: flat[n] for leaf in ours.layout.values() for n in leaf.names}, ours.layout)
