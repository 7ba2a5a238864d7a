"""Limits that follow from a model's configuration, checked before any weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from trillora.errors import TrilloraError

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

# This module is the only one that lists architectures by name: the structure of a module does not show these limits.

# Models that keep state outside transformers' cache: every decoded token would start without the text before it.
CANNOT_DECODE = {
    "minimax": "lightning attention keeps its state outside the cache",
    "recurrent_gemma": "its recurrent blocks keep their state inside the module",
    "rwkv": "it keeps its state outside the cache",
    "xlstm": "it keeps its state outside the cache",
}

# Layers that PEFT refuses as targets: fast kernels of these models read the weight, so an adapter would be ignored.
REFUSED_BY_PEFT = dict.fromkeys(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"), "out_proj")


def refused_by_peft(config: PretrainedConfig, names: Iterable[str]) -> list[str]:
    """The layers that PEFT refuses as targets of LoRA."""
    refused = REFUSED_BY_PEFT.get(getattr(config, "model_type", ""))
    return [name for name in names if name.rpartition(".")[2] == refused]


def why_not_decode(config: PretrainedConfig) -> str | None:
    """Why the model cannot generate text here; None if it can."""
    return CANNOT_DECODE.get(config.get_text_config().model_type)


def check_rows(config: PretrainedConfig, sequence_length: int) -> None:
    """Refuses a model whose tokens see the next ones, and sequences longer than the model's positions."""
    text = config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):  # "vision": only between images
        raise TrilloraError(
            "Every token of this model sees the tokens after it, so it cannot learn to predict them.",
            where="model: use_bidirectional_attention in config.json",
            do="choose a model that generates text",
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and sequence_length > longest:
        raise TrilloraError(
            f"Sequences of {sequence_length} tokens are longer than the {longest} positions this model supports.",
            where="train.sequence_length",
            do=f"use at most {longest}",
        )
