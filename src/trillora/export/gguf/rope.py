"""Rotary positions in a GGUF file: the base, and how the frequencies are scaled for long contexts.

    rope_of(config, head_dim=64, known=("default", "llama3"))
    Rope({"rope.freq_base": 500000.0, "rope.dimension_count": 64}, {"rope_freqs.weight": [32 factors]})

llama.cpp computes the plain, linear and YaRN frequencies itself. Llama 3's and LongRoPE's are factors that divide the
frequencies, stored as tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trillora.errors import TrilloraError

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

# What transformers reads for each type. Any other key could change the frequencies.
_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor"),
    "longrope": ("factor", "long_factor", "short_factor", "original_max_position_embeddings", "attention_factor"),
}
_ALWAYS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class Rope:
    values: dict[str, int | float | str]  # metadata, without the architecture's name
    tensors: dict[str, np.ndarray]


def rope_of(config: PretrainedConfig, head_dim: int, known: tuple[str, ...]) -> Rope:
    """Metadata and tensors of a text model's rotary positions. `known`: the types that llama.cpp has for the family."""
    parameters = config.rope_parameters
    swa: dict[str, int | float | str] = {}
    if "full_attention" in parameters:  # one set for each kind of layer
        local = parameters["sliding_attention"]
        _check(local, ("default",))
        swa = {"rope.freq_base_swa": float(local["rope_theta"])}
        parameters = parameters["full_attention"]
    kind = _check(parameters, known)
    num_rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if num_rotated != head_dim and "longrope" not in known:  # only Phi's code in llama.cpp rotates a part of each head
        raise _unknown(f"partial_rotary_factor {parameters['partial_rotary_factor']}")
    values: dict[str, int | float | str] = {
        "rope.freq_base": float(parameters["rope_theta"]),
        "rope.dimension_count": num_rotated,
        **swa,
    }
    tensors: dict[str, np.ndarray] = {}
    if kind in ("linear", "yarn"):
        values |= {"rope.scaling.type": kind, "rope.scaling.factor": float(parameters["factor"])}
    if kind == "yarn":
        values |= _yarn(parameters, config.max_position_embeddings)
    elif kind == "llama3":
        tensors["rope_freqs.weight"] = _llama3_factors(parameters, num_rotated)
    elif kind == "longrope":
        original = _original_length(parameters, config)
        values |= {"rope.scaling.type": kind, "rope.scaling.original_context_length": original}
        values["rope.scaling.attn_factor"] = _longrope_attention(parameters, config.max_position_embeddings, original)
        for size in ("long", "short"):
            tensors[f"rope_factors_{size}.weight"] = np.array(parameters[f"{size}_factor"], np.float32)
    return Rope(values, tensors)


def _check(parameters: Mapping[str, object], known: tuple[str, ...]) -> str:
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in known:
        raise _unknown(f"rope type {kind!r}")
    others = [key for key, value in parameters.items() if value is not None and key not in (*_KEYS[kind], *_ALWAYS)]
    if others:
        raise _unknown(f"{others[0]} for rope type {kind!r}")
    return kind


def _unknown(what: str) -> TrilloraError:
    return TrilloraError(
        f"This model cannot be written as GGUF: it has {what}, which llama.cpp does not have for this family.",
        where="rope_parameters in config.json of the base model, or model.rope of the run",
        do="use --to merged, which writes the model for transformers and vLLM",
    )


def _yarn(parameters: Mapping[str, Any], num_positions: int) -> dict[str, int | float | str]:
    factor, attention = float(parameters["factor"]), parameters.get("attention_factor")
    usual = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    if attention is not None and not math.isclose(attention, usual, rel_tol=1e-4):
        raise _unknown(f"attention_factor {attention} with YaRN")  # llama.cpp always computes the usual one
    return {
        "rope.scaling.original_context_length": parameters.get("original_max_position_embeddings") or num_positions,
        "rope.scaling.yarn_beta_fast": float(parameters.get("beta_fast") or 32),
        "rope.scaling.yarn_beta_slow": float(parameters.get("beta_slow") or 1),
    }


def _llama3_factors(parameters: Mapping[str, Any], num_rotated: int) -> np.ndarray:
    """By what each frequency is divided: nothing for short wavelengths, the factor for long ones, smooth between."""
    theta, factor = float(parameters["rope_theta"]), float(parameters["factor"])
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    wavelengths = 2 * math.pi * theta ** (np.arange(0, num_rotated, 2) / num_rotated)
    # 0 where the wavelength is at least 1/low of the original context, 1 where it is at most 1/high.
    share = np.clip((parameters["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


def _original_length(parameters: Mapping[str, Any], config: PretrainedConfig) -> int:
    found = parameters.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return int(found or config.max_position_embeddings)


def _longrope_attention(parameters: Mapping[str, Any], num_positions: int, original: int) -> float:
    if (given := parameters.get("attention_factor")) is not None:
        return float(given)
    factor = num_positions / original
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
