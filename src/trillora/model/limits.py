"""Limits that follow from a model's configuration, checked before any weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from trillora.errors import TrilloraError

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig
    from trillora.recipe.lora import RopeSection

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

# Their code computes rotary frequencies itself, and does not read the type.
HAS_OWN_ROTATION = ("recurrent_gemma",)
# transformers reads no other scaling in a config.json of these models: a merged model could not be loaded.
HAS_ONLY_LONGROPE = ("phi3", "phi4_multimodal", "phimoe")
_OF_PLAIN_ROPE = ("rope_type", "type", "rope_theta", "partial_rotary_factor")


def refused_by_peft(config: PretrainedConfig, names: Iterable[str]) -> list[str]:
    """The layers that PEFT refuses as targets of LoRA."""
    refused = REFUSED_BY_PEFT.get(getattr(config, "model_type", ""))
    return [name for name in names if name.rpartition(".")[2] == refused]


def why_not_decode(config: PretrainedConfig) -> str | None:
    """Why the model cannot generate text here; None if it can."""
    return CANNOT_DECODE.get(config.get_text_config().model_type)


def why_not_scaled(config: PretrainedConfig) -> str | None:
    """Why `model.rope` cannot scale the positions of a model; None if it can."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None)
    if not parameters or getattr(text, "alibi", False) or text.model_type in HAS_OWN_ROTATION:
        return "it has no rotary positions that transformers can scale"
    if "rope_type" not in parameters:
        return "its kinds of layers have different rotary positions"
    if text.model_type in HAS_ONLY_LONGROPE:
        return f"transformers scales the positions of {text.model_type} by longrope only"
    if (kind := parameters["rope_type"]) != "default":
        return f"its own config has rotary positions of the type {kind} already"
    if others := [key for key, value in parameters.items() if value is not None and key not in _OF_PLAIN_ROPE]:
        return f"its rotary positions have {others[0]}"
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        return "its config does not say for how many positions it was trained (max_position_embeddings)"
    return None


def can_have_yarn(config: PretrainedConfig) -> bool:
    """Whether transformers can compute yarn for a model that can be scaled: it needs a head_dim, which some configs
    leave empty."""
    return getattr(config.get_text_config(), "head_dim", 0) is not None


def check_rows(config: PretrainedConfig, sequence_length: int, rope: RopeSection | None = None) -> None:
    """Refuses a model whose tokens see the next ones, and sequences longer than the model's positions. `rope` is what
    the recipe says; the config has it already."""
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
            do=f"use at most {longest}{_or_scale(config, sequence_length / longest, rope)}",
        )


def _or_scale(config: PretrainedConfig, missing: float, rope: RopeSection | None) -> str:
    """What to write for sequences that are longer by the factor `missing`."""
    if rope is not None:
        return f", or set model.rope.factor to {math.ceil(rope.factor * missing)}"
    if why_not_scaled(config) is not None:
        return ""
    kind = "yarn" if can_have_yarn(config) else "llama3"
    return f", or scale the positions: model.rope: {{type: {kind}, factor: {math.ceil(missing)}}}"
