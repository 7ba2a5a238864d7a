"""Small checkpoints, and their layout on the devices."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
)

from trillora.model.layout import Layout, Leaf

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}


def llama(**changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**TINY, "tie_word_embeddings": False, **changes})


def meta_model(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Any:
    """The model as the bridge builds it: parameters without memory, buffers with their computed values."""
    register = torch.nn.Module.register_parameter

    def on_meta(self: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(self, name, parameter)
        if parameter is not None:
            self._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def layout_of(module: Any, dtype: Any = jnp.float32, *, stacked: bool = False, drop: tuple[str, ...] = ()) -> Layout:
    """Every parameter and buffer once (tied ones under their first name); with `stacked`, equal layers are stacked."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    groups: dict[str, list[str]] = {}
    for name in tensors:
        if name not in drop:
            numbered = re.sub(r"\.(layers|h)\.\d+\.", r".\1.*.", name)
            groups.setdefault(numbered if stacked else name, []).append(name)
    layout: Layout = {}
    for key, names in groups.items():
        first = tensors[names[0]]
        kind = np.dtype(dtype) if first.is_floating_point() else np.dtype(np.int32)
        if "*" in key:
            key = key.replace("*", f"0:{len(names)}:1")
            layout[key] = Leaf(tuple(names), True, (len(names), *first.shape), kind)
        else:
            layout[key] = Leaf(tuple(names), False, tuple(first.shape), kind)
    return layout


def whole(layout: Layout) -> dict[str, Sharding]:
    return dict.fromkeys(layout, jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def sharded(layout: Layout) -> dict[str, Sharding]:
    """Over a 2 x 4 mesh: the widest divisible dim over `fsdp`, replicated over `data`, as a real run would."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def spec(leaf: Leaf) -> PartitionSpec:
        dims: list[str | None] = [None] * len(leaf.shape)
        candidates = [d for d in range(int(leaf.stacked), len(dims)) if leaf.shape[d] % 4 == 0]
        if candidates:
            dims[max(candidates, key=lambda d: leaf.shape[d])] = "fsdp"
        return PartitionSpec(*dims)

    return {key: NamedSharding(mesh, spec(leaf)) for key, leaf in layout.items()}


def as_float(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array).astype(np.float32)


def memory_config() -> LlamaConfig:
    return llama(hidden_size=1024, intermediate_size=4096, vocab_size=16384, num_hidden_layers=8)
