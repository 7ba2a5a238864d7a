"""LoRA of experts. An MoE model stores the weights of all experts of a layer in one parameter, which is a target.

`….mlp.experts.gate_up_proj` [E, O, I] gets R rows of A and R columns of B for each expert, in the order of PEFT's file:

    A [E·R, I]    row e·R + j is row j of expert e
    B [O, R·E]    column j·E + e is column j of expert e

PEFT wraps the module of the experts once for each of its targets. The arrays of the parameter that the module registers
last are `….experts.lora_a`, of the one before `….experts.base_layer.lora_a`. The names in memory are the
same: `base_layer` is an empty module that holds them.

Where our own function computes the experts (`overrides/experts.py`), it multiplies by A and B of each token's expert.
The code of a model that does it itself reads the parameter, and gets W + scale · B A.

Legend: E experts, R rank, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop

from trillora.errors import TrilloraError
from trillora.model.lora_spec import LayerLora, LoraSpec
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS

INNER = "base_layer"


@dataclass(frozen=True)
class ExpertParameter:
    """The weights of one projection of all experts of a layer."""

    module: torch.nn.Module
    name: str  # in the module

    @property
    def num_experts(self) -> int:
        return int(self.module.num_experts)

    @property
    def num_weights(self) -> int:
        return int(self.module._parameters[self.name].numel())

    @property
    def features(self) -> tuple[int, int]:
        """Numbers of inputs and outputs, as PEFT sees them."""
        _, rows, columns = self.module._parameters[self.name].shape
        return (rows, columns) if self.is_transposed else (columns, rows)

    @property
    def is_transposed(self) -> bool:
        """Whether the parameter is [E, I, O]."""
        return _is_transposed(self.module)

    @property
    def lora(self) -> tuple[str, float]:
        """Of an adapted parameter: where its A and B are in the module, and the scale."""
        place: tuple[str, float] = self.module.expert_lora[self.name]
        return place


def expert_parameters(model: torch.nn.Module) -> dict[str, ExpertParameter]:
    """The parameters [E, …, …] of modules that have E experts, by their names in the model."""
    found = {}
    for path, module in model.named_modules():
        num_experts = getattr(module, "num_experts", None)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and parameter.shape[0] == num_experts:
                found[f"{path}.{name}"] = ExpertParameter(module, name)
    return found


def split_by_expert(model: torch.nn.Module) -> set[str]:
    """The parameters of experts, and their biases, that our own function computes with (`overrides/experts.py`): on a
    mesh, each device may have the arrays of some experts."""
    return {
        f"{path}.{name}"
        for path, module in model.named_modules()
        if hasattr(module, "is_transposed")  # set by transformers' interface
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dim() > 1 and parameter.shape[0] == module.num_experts
    }


def linear_routers(experts: Mapping[str, ExpertParameter], linear: Mapping[str, Any]) -> list[str]:
    """The linear layers that are routers: next to the experts, one output for each of them, and the only linear layer
    of its part. Most models have a module of another kind. The gate of a shared expert, with one output, is one too."""
    found = []
    for name, parameter in experts.items():
        parent = name.rsplit(".", 2)[0]
        parts: dict[str, list[str]] = {}
        for layer in linear:
            if layer.startswith(f"{parent}."):
                parts.setdefault(layer.removeprefix(f"{parent}.").partition(".")[0], []).append(layer)
        alone = [layers[0] for layers in parts.values() if len(layers) == 1]
        found += [layer for layer in alone if linear[layer].weight.shape[0] in (1, parameter.num_experts)]
    return found


def add_to_experts(parameters: Mapping[str, ExpertParameter], layers: Mapping[str, LayerLora], spec: LoraSpec) -> None:
    """Adds the adapter's arrays (on the meta device) to the modules of the experts that are in `layers`."""
    targets = {name: parameter for name, parameter in parameters.items() if name in layers}
    if not targets:
        return
    if spec.dora or spec.pissa or spec.dropout:
        option = "dora" if spec.dora else "init" if spec.pissa else "dropout"
        raise TrilloraError(
            f"Experts can have plain LoRA only, without lora.{option}: PEFT could not load the adapter.",
            where=spec.file or "lora.targets",
            do=f"remove lora.{option}, or remove the experts from lora.targets",
        )
    modules = {id(parameter.module): parameter.module for parameter in targets.values()}
    for module in modules.values():
        own = {target.name: (name, target) for name, target in targets.items() if target.module is module}
        holder, path = module, ""
        module.expert_lora = {}
        for short, (name, target) in reversed(own.items()):
            if module.expert_lora:
                holder.base_layer = torch.nn.Module()
                holder, path = holder.base_layer, f"{path}.{INNER}".lstrip(".")
            num_in, num_out = target.features
            rows = target.num_experts * layers[name].rank
            holder.lora_a = torch.nn.Parameter(torch.empty(rows, num_in, device="meta"))
            holder.lora_b = torch.nn.Parameter(torch.empty(num_out, rows, device="meta"))
            module.expert_lora[short] = (path, spec.scale_of(layers[name]))
        module.__class__ = _with_adapted_weights(module.__class__, tuple(own))


def by_expert(a: Any, b: Any, num_experts: int) -> tuple[Any, Any]:
    """A [E, R, I] and B [E, R, O] of arrays in the order of the file."""
    return a.reshape(num_experts, -1, a.shape[-1]), b.reshape(b.shape[0], -1, num_experts).transpose(2, 1, 0)


def lora_of(module: torch.nn.Module, name: str) -> tuple[jax.Array, jax.Array] | None:
    """A [E, R, I] and scale · B [E, R, O] of a parameter during a call; None if it has no adapter."""
    place = module.__dict__.get("expert_lora", {}).get(name)
    if place is None:
        return None
    path, scale = place
    holder = module.get_submodule(path)
    a, b = interop.jax_view(holder.lora_a), interop.jax_view(holder.lora_b)
    a_ERI, b_ERO = by_expert(a, b, module.num_experts)
    return a_ERI, b_ERO * scale


@functools.cache
def _with_adapted_weights(cls: Any, names: tuple[str, ...]) -> type:
    weights = {name: property(functools.partial(_adapted_weight, name=name)) for name in names}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **weights})


def _adapted_weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    weight: torch.Tensor = module._parameters[name]
    lora = lora_of(module, name) if isinstance(weight, TORCHAX_TENSORS) else None
    if lora is None:  # called as ordinary PyTorch
        return weight
    a_ERI, b_ERO = lora
    change = jnp.einsum("ero,eri->eio" if _is_transposed(module) else "ero,eri->eoi", b_ERO, a_ERI)
    base = interop.jax_view(weight)
    return interop.torch_view(base + change.astype(base.dtype))


def _is_transposed(module: torch.nn.Module) -> bool:
    """Whether the parameters are [E, I, O]. PEFT reads the same flag."""
    return bool(getattr(module, "is_transposed", False))
