"""The kinds of arrays that an adapter consists of. This table is the only place that lists them.

A kind is recognized by the end of a parameter's name; the shape is the same in memory and in PEFT's file:

    model.layers.0.mlp.up_proj.lora_a  <->  base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
    model.layers.0.mlp.up_proj.lora_b  <->  base_model.model.model.layers.0.mlp.up_proj.lora_B.weight

Legend: R rank, D inputs, E outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

_PREFIX = "base_model.model."


@dataclass(frozen=True)
class ArrayKind:
    """One kind of array."""

    suffix: str  # of the name in memory
    in_file: str  # the suffix in PEFT's file
    num_dims: int | None  # of one array, without the stack of layers; None: any
    rank_dim: int | None = None  # which dim is the adapter's rank
    is_zero_at_start: bool = False
    from_base: bool = False  # starts as a copy of the base's values
    is_fast: bool = False  # whether LoRA+ raises its learning rate; PEFT includes vectors


LORA_A = ArrayKind(".lora_a", ".lora_A.weight", 2, rank_dim=0)  # [R, D]
LORA_B = ArrayKind(".lora_b", ".lora_B.weight", 2, rank_dim=1, is_zero_at_start=True, is_fast=True)  # [E, R]
MAGNITUDE = ArrayKind(".lora_magnitude", ".lora_magnitude_vector", 1, is_fast=True)  # [E], of DoRA
# Of an embedding [V, D], whose inputs are tokens: [R, V] and [D, R]. PEFT starts with A at zero.
EMBEDDING_A = ArrayKind(".lora_embedding_a", ".lora_embedding_A", 2, rank_dim=0, is_zero_at_start=True)
EMBEDDING_B = ArrayKind(".lora_embedding_b", ".lora_embedding_B", 2, rank_dim=1)
# [tokens, D], values of single tokens
TOKEN_ROWS = ArrayKind(".token_rows", ".token_adapter.trainable_tokens_delta", 2, from_base=True)
# Of modules that are trained as a whole
SAVED_WEIGHT = ArrayKind(".saved_weight", ".weight", None, from_base=True)
SAVED_BIAS = ArrayKind(".saved_bias", ".bias", None, from_base=True)
# In this order: the end of lora_A.weight is also the end of a whole weight.
KINDS = (LORA_A, LORA_B, MAGNITUDE, EMBEDDING_A, EMBEDDING_B, TOKEN_ROWS, SAVED_WEIGHT, SAVED_BIAS)
SUFFIXES = tuple(kind.suffix for kind in KINDS)


def kind_of(name: str) -> ArrayKind:
    """The kind of an array of the adapter, by its name or its key in the layout."""
    return next(kind for kind in KINDS if name.endswith(kind.suffix))


def is_of_lora(name: str) -> bool:
    """Whether it belongs to a target of LoRA: not a token's row, and not a whole weight."""
    return not kind_of(name).from_base


def name_in_file(name: str) -> str:
    kind = kind_of(name)
    return f"{_PREFIX}{name.removesuffix(kind.suffix)}{kind.in_file}"


def name_in_memory(name: str) -> str | None:
    """The inverse of `name_in_file`; None for an array that is not of a known kind. PEFT may add copies of the base's
    embedding, as `base_layer`. It loads them over the base, so they are whole weights."""
    for kind in KINDS:
        if name.startswith(_PREFIX) and name.endswith(kind.in_file):
            stem = name.removeprefix(_PREFIX).removesuffix(kind.in_file)
            if kind in (SAVED_WEIGHT, SAVED_BIAS):
                stem = stem.removesuffix(".base_layer").removesuffix(".token_adapter")
                if "lora_" in stem.rpartition(".")[2]:  # an unknown part of LoRA
                    return None
            return stem + kind.suffix
    return None
