"""How much of a model an adapter adapts, and what stays frozen.

share = adapted_share(model)
share.linear                   AdaptedPart(num_adapted=196, num_frozen=0, adapted=440_401_920, frozen=0)
share.frozen_names             ("gate_proj", "up_proj"): linear layers without an adapter, the head not included
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trillora.model.bridge import CausalLM
from trillora.model.loading.wrapper import removed_modules
from trillora.model.lora import linear_layers
from trillora.model.parts.expert_parameters import expert_parameters


@dataclass(frozen=True)
class AdaptedPart:
    """One kind of weights: how many there are, and how many parameters they have."""

    num_adapted: int
    num_frozen: int
    adapted: int  # parameters
    frozen: int


@dataclass(frozen=True)
class AdaptedShare:
    """The weights of a model by kind. All others (embeddings, norms, routers, the head) are not counted as layers."""

    linear: AdaptedPart  # linear layers without the head, unless it is adapted
    frozen_names: tuple[str, ...]  # last parts of the names of frozen linear layers
    experts: AdaptedPart  # weights that hold one projection of all experts of a layer
    num_experts: int  # in one layer
    total: int  # parameters of the base
    trained: int  # parameters of the adapter
    left_out: tuple[str, ...] = ()  # last parts of the names of what a multimodal model has next to its text model


def adapted_share(model: CausalLM) -> AdaptedShare:
    targets, head = {*model.targets}, model.module.get_output_embeddings()
    linear = {
        name: layer.weight.numel()
        for name, layer in linear_layers(model.module).items()
        if layer is not head or name in targets
    }
    experts = expert_parameters(model.module)
    of_adapter = {name for leaf in model.adapter_layout.values() for name in leaf.names}
    return AdaptedShare(
        linear=_part(linear, targets),
        frozen_names=tuple(dict.fromkeys(name.rpartition(".")[2] for name in linear if name not in targets)),
        experts=_part({name: parameter.num_weights for name, parameter in experts.items()}, targets),
        num_experts=max((parameter.num_experts for parameter in experts.values()), default=0),
        total=sum(p.numel() for name, p in model.module.named_parameters() if name not in of_adapter),
        trained=sum(math.prod(leaf.shape) for leaf in model.adapter_layout.values()),
        left_out=_outermost(removed_modules(model.module)),
    )


def _outermost(names: frozenset[str]) -> tuple[str, ...]:
    return tuple(sorted(last for parent, _, last in (name.rpartition(".") for name in names) if parent not in names))


def _part(sizes: Mapping[str, int], targets: set[str]) -> AdaptedPart:
    adapted = [size for name, size in sizes.items() if name in targets]
    return AdaptedPart(len(adapted), len(sizes) - len(adapted), sum(adapted), sum(sizes.values()) - sum(adapted))
