"""The kinds of arrays that an adapter consists of. This table is the only place that lists them.

A kind is recognised by the end of a parameter's name; the shape is the same in memory and in PEFT's file:

    model.layers.0.mlp.up_proj.lora_a  <->  base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
    model.layers.0.mlp.up_proj.lora_b  <->  base_model.model.model.layers.0.mlp.up_proj.lora_B.weight

Legend: R rank, D inputs, E outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Kind:
    """One kind of array."""

    suffix: str  # of the name in memory
    in_file: str  # the suffix in PEFT's file
    num_dims: int  # of one array, without the stack of layers
    decays: bool  # whether weight decay applies
    rank_dim: int | None = None  # which dim is the adapter's rank
    is_zero_at_start: bool = False
    is_fast: bool = False  # whether LoRA+ raises its learning rate; PEFT includes vectors


LORA_A = Kind(".lora_a", ".lora_A.weight", 2, decays=True, rank_dim=0)  # [R, D]
LORA_B = Kind(".lora_b", ".lora_B.weight", 2, decays=True, rank_dim=1, is_zero_at_start=True, is_fast=True)  # [E, R]
MAGNITUDE = Kind(".lora_magnitude", ".lora_magnitude_vector", 1, decays=False, is_fast=True)  # [E], of DoRA
KINDS = (LORA_A, LORA_B, MAGNITUDE)
SUFFIXES = tuple(kind.suffix for kind in KINDS)


def kind_of(name: str) -> Kind:
    """The kind of an array of the adapter, by its name or its key in the layout."""
    return next(kind for kind in KINDS if name.endswith(kind.suffix))


def name_in_file(name: str) -> str:
    kind = kind_of(name)
    return f"{_PREFIX}{name.removesuffix(kind.suffix)}{kind.in_file}"


def name_in_memory(name: str) -> str | None:
    """The inverse of `name_in_file`; None for an array that is not of a known kind."""
    for kind in KINDS:
        if name.startswith(_PREFIX) and name.endswith(kind.in_file):
            return name.removeprefix(_PREFIX).removesuffix(kind.in_file) + kind.suffix
    return None
