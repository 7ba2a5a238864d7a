"""Adapters side by side: a batch whose rows use different ones.

The ranks of all adapters follow each other, so that one matmul by A and one by B serve every row. What A gives is
zeroed in the ranks that are not the row's own (`model.lora.own_ranks`):

    number  adapter          A [4 * 2, D]    B [E, 4 * 2], with the scale of each
    0       the base         0, 0            0, 0
    1       one, rank 2      a0, a1          b0, b1
    2       two, rank 1      c0, 0           d0, 0
    3       other layers     0, 0            0, 0

Only plain LoRA of linear layers is a sum like this. An adapter of another kind keeps a batch to itself.

Legend: A adapters, B rows, R ranks of a layer, D inputs, E outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from trillora.model.adapter_parameters import LORA_B, kind_of
from trillora.model.adapters import check_shapes
from trillora.model.bridge import CausalLM
from trillora.model.layout import Leaf, Tree
from trillora.model.lora import features, linear_layers
from trillora.model.lora_spec import LayerLora, LoraSpec
from trillora.model.trace import ChosenAdapters
from trillora.step.shardings import shard_adapter

MOST_PADDING = 4  # the adapters side by side need at most this many times their own memory
LARGEST = 1e38  # entry of a scaled B: zero times infinity would reach the other rows


@dataclass(frozen=True)
class ReadAdapter:
    """An adapter as its files have it."""

    name: str
    folder: Path
    spec: LoraSpec
    matrices: dict[str, np.ndarray]  # by parameter name
    layers: dict[str, LayerLora]  # of the model that are adapted

    @property
    def size(self) -> int:
        return sum(array.size for array in self.matrices.values())


def split_by_kind(
    adapters: Sequence[ReadAdapter], model: CausalLM
) -> tuple[list[ReadAdapter], list[tuple[ReadAdapter, str]]]:
    """The adapters that can share a batch, and the others with the reason."""
    linear = linear_layers(model.module)
    reasons = {adapter.name: why_alone(adapter, linear) for adapter in adapters}
    shared = [adapter for adapter in adapters if not reasons[adapter.name]]
    while _padding(shared, linear) > MOST_PADDING:
        widest = max(shared, key=lambda adapter: adapter.size)
        reasons[widest.name] = "the others would need too much memory if they were padded to its ranks and layers"
        shared.remove(widest)
    return shared, [(adapter, reasons[adapter.name]) for adapter in adapters if reasons[adapter.name]]


def why_alone(adapter: ReadAdapter, linear: Collection[str]) -> str:
    """Why an adapter cannot share a batch, for people; empty if it can. `linear`: the model's linear layers."""
    spec = adapter.spec
    if spec.dora:
        return "it is DoRA"
    if spec.tokens is not None or spec.whole:
        return "it has rows or modules that were trained as a whole"
    if any(name not in linear for name in adapter.layers):
        return "it adapts more than linear layers"
    for name, layer in adapter.layers.items():
        if spec.scale_of(layer) * float(np.abs(adapter.matrices[name + LORA_B.suffix]).max(initial=0.0)) >= LARGEST:
            return f"its matrices of {name} are too large"
    return ""


def covering(adapters: Sequence[ReadAdapter]) -> LoraSpec:
    """Options with all layers of these adapters, in each of them with the largest rank. The scale is 1."""
    ranks = _largest_ranks(adapters)
    alphas = {name: float(rank) for name, rank in ranks.items()}
    return LoraSpec(1, 1.0, targets=tuple(ranks), rank_pattern=(*ranks.items(),), alpha_pattern=(*alphas.items(),))


def place_stack(adapters: Sequence[ReadAdapter], model: CausalLM, mesh: Mesh) -> Tree:
    """The base and these adapters side by side, on the devices. `model` has the `covering` options."""
    layout, num_adapters = model.adapter_layout, 1 + len(adapters)
    for adapter in adapters:
        own = {key: leaf for key, leaf in layout.items() if _target(key) in adapter.layers}
        expected = {key: _with_ranks(key, leaf, adapter.layers[_target(key)].rank) for key, leaf in own.items()}
        check_shapes({n: array.shape for n, array in adapter.matrices.items()}, expected, where=str(adapter.folder))
    whole = {key: _with_ranks(key, leaf, num_adapters * leaf.shape[_rank_dim(key)]) for key, leaf in layout.items()}
    shardings = shard_adapter(whole, mesh)
    return {
        key: jax.device_put(_joined(key, leaf, adapters, _dtype_of(model, key)), shardings[key])
        for key, leaf in layout.items()
    }


def chosen_by(numbers_B: jax.Array, adapters: Tree, num_adapters: int) -> tuple[Tree, ChosenAdapters | None]:
    """The adapters that these rows use, and which of them each row does; None if there is only one. If there are fewer
    rows than adapters, each row gets a copy of its own: the others are not read."""
    num_rows = len(numbers_B)
    if num_rows < num_adapters:
        adapters = {key: _taken(array, _rank_dim(key), numbers_B, num_adapters) for key, array in adapters.items()}
        numbers_B, num_adapters = jnp.arange(num_rows), num_rows
    return adapters, ChosenAdapters(numbers_B, num_adapters) if num_adapters > 1 else None


def _taken(array: jax.Array, dim: int, numbers_B: jax.Array, num_adapters: int) -> jax.Array:
    apart = array.reshape(*array.shape[:dim], num_adapters, -1, *array.shape[dim + 1 :])
    taken = jnp.take(apart, numbers_B, axis=dim, mode="clip")
    return taken.reshape(*array.shape[:dim], -1, *array.shape[dim + 1 :])


def _joined(key: str, leaf: Leaf, adapters: Sequence[ReadAdapter], dtype: np.dtype) -> np.ndarray:
    """One array of the stack. `leaf`: of one adapter."""
    parts, target, is_b = [np.zeros(leaf.shape, dtype)], _target(key), kind_of(key) is LORA_B
    for adapter in adapters:
        if target not in adapter.layers:
            parts.append(parts[0])
            continue
        array = adapter.matrices[key]
        if is_b:
            array = array * np.float32(adapter.spec.scale_of(adapter.layers[target]))
        padding = [(0, whole - own) for own, whole in zip(array.shape, leaf.shape, strict=True)]
        parts.append(np.pad(array.astype(dtype), padding))
    return np.concatenate(parts, axis=_rank_dim(key))


def _dtype_of(model: CausalLM, key: str) -> np.dtype:
    """The dtype in which a layer multiplies: of its weight, which may be stored quantized."""
    weight = model.module.get_submodule(_target(key))._parameters["weight"]
    assert weight is not None
    return jnp.dtype(str(weight.dtype).removeprefix("torch."))


def _largest_ranks(adapters: Sequence[ReadAdapter]) -> dict[str, int]:
    ranks: dict[str, int] = {}
    for adapter in adapters:
        for name, layer in adapter.layers.items():
            ranks[name] = max(ranks.get(name, 0), layer.rank)
    return ranks


def _padding(adapters: Sequence[ReadAdapter], linear: Mapping[str, object]) -> float:
    """How many times more numbers these adapters are side by side, with the base, than each for itself."""
    one = sum(rank * sum(features(linear[name])) for name, rank in _largest_ranks(adapters).items())
    return (1 + len(adapters)) * one / max(sum(adapter.size for adapter in adapters), 1)


def _with_ranks(key: str, leaf: Leaf, num_ranks: int) -> Leaf:
    dim = _rank_dim(key)
    return replace(leaf, shape=(*leaf.shape[:dim], num_ranks, *leaf.shape[dim + 1 :]))


def _rank_dim(key: str) -> int:
    dim = kind_of(key).rank_dim
    assert dim is not None
    return dim


def _target(key: str) -> str:
    return key.rpartition(".")[0]
