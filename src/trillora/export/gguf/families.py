"""The model families that can be written as GGUF, as one table, and what llama.cpp assumes about each.

    family_of(config)                  FAMILIES["qwen3"]
    describe(family, config, 151936)   Description({"qwen3.block_count": 28, …}, notes)

A GGUF file contains no code: llama.cpp builds the model from `general.architecture` and a few numbers, and takes a
default for each that is missing. So every option of the config that changes the result is written, or compared with
what llama.cpp assumes and refused if it differs. Each family is tested against llama.cpp (`tests/export/test_gguf.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trillora.errors import TrilloraError
from trillora.export.gguf.rope import Rope, rope_of

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

WHERE = "config.json of the base model"
OTHER_WAY = "use --to merged, which writes the model for transformers and vLLM"


@dataclass(frozen=True)
class Family:
    """What llama.cpp's code for one architecture expects."""

    title: str
    arch: str  # general.architecture
    activation: tuple[str, ...] = ("silu",)
    # llama.cpp rotates neighboring pairs (0, 1), (2, 3), … in `llama`, transformers the two halves of a head. So the
    # rows of the query and key projections are reordered.
    permutes: bool = False
    norm_offset: float = 0.0  # added to the weights of all norms: Gemma's norms multiply by 1 + weight
    rope_types: tuple[str, ...] = ("default",)
    window: bool = False  # llama.cpp reads the sliding window
    soft_caps: tuple[str, ...] = ()  # options with a cap that must be there: llama.cpp has its own default
    may_cap: bool = False  # the final soft cap may be there
    scaled_by_width: int | None = None  # number of layers for which the attention scale is hidden_size / heads
    head_is_width: bool = False  # head_dim must be hidden_size / heads
    assumes: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # option -> values that llama.cpp assumes
    wrappers: tuple[str, ...] = ()  # multimodal model types whose text part can be written


_EXPERTS: Mapping[str, tuple[Any, ...]] = {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
_CAUSAL: Mapping[str, tuple[Any, ...]] = {"use_bidirectional_attention": (None, False)}
_TANH = ("gelu_pytorch_tanh",)
_SCALED = ("default", "linear", "yarn")

FAMILIES: dict[str, Family] = {
    "llama": Family("Llama, SmolLM2", "llama", permutes=True, rope_types=(*_SCALED, "llama3")),
    "mistral": Family("Mistral", "llama", permutes=True, rope_types=_SCALED),
    "mixtral": Family("Mixtral", "llama", permutes=True),
    "qwen2": Family("Qwen 2, 2.5", "qwen2", rope_types=_SCALED),
    "qwen2_moe": Family("Qwen 2 MoE", "qwen2moe", assumes={**_EXPERTS, "norm_topk_prob": (False,)}),
    "qwen3": Family("Qwen 3", "qwen3", rope_types=_SCALED),
    "qwen3_moe": Family("Qwen 3 MoE", "qwen3moe", rope_types=_SCALED, assumes={**_EXPERTS, "norm_topk_prob": (True,)}),
    # Released configs of Gemma 1 say gelu. The model was trained with the tanh form, which llama.cpp uses.
    "gemma": Family("Gemma", "gemma", (*_TANH, "gelu"), norm_offset=1.0, assumes=_CAUSAL),
    "gemma2": Family(
        "Gemma 2",
        "gemma2",
        _TANH,
        norm_offset=1.0,
        window=True,
        soft_caps=("attn_logit_softcapping", "final_logit_softcapping"),
        scaled_by_width=46,
        assumes=_CAUSAL,
    ),
    "gemma3_text": Family(
        "Gemma 3",
        "gemma3",
        _TANH,
        norm_offset=1.0,
        rope_types=("default", "linear"),
        window=True,
        may_cap=True,
        scaled_by_width=62,
        assumes={**_CAUSAL, "attn_logit_softcapping": (None,)},
        wrappers=("gemma3",),
    ),
    "phi3": Family("Phi-3, Phi-4", "phi3", rope_types=("default", "longrope"), head_is_width=True),
}


@dataclass(frozen=True)
class Description:
    """The metadata of the architecture, and the rotary tensors that belong to it."""

    values: dict[str, int | float | str]  # by key, with the architecture's name in front
    rope: Rope
    notes: tuple[str, ...]


def family_of(config: PretrainedConfig) -> Family:
    """The family of a transformers config, also of a multimodal one; other models raise an error that lists them."""
    text = config.get_text_config()
    family = FAMILIES.get(text.model_type)
    if family is None or (text is not config and config.model_type not in family.wrappers):
        known = "; ".join(f"{each.title} ({name})" for name, each in FAMILIES.items())
        raise TrilloraError(
            f"model_type '{config.model_type}' cannot be written as GGUF.",
            where=WHERE,
            do=f"{OTHER_WAY}. Families that were compared with llama.cpp: {known}",
        )
    return family


def describe(family: Family, config: PretrainedConfig, num_tokens: int) -> Description:
    """Checks the config of a text model and returns its metadata. `num_tokens`: rows of the embedding."""
    _check(family, config)
    head_dim = head_dim_of(config)
    rope = rope_of(config, head_dim, family.rope_types)
    num_positions, notes = _context(family, config)
    values: dict[str, Any] = {
        "context_length": num_positions,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": num_tokens,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        **_experts(config),
        **_caps(family, config),
        **(_window(config) if family.window else {}),
        **rope.values,
    }
    if getattr(config, "hidden_act", None) == "gelu":
        notes = (*notes, "llama.cpp computes GELU with tanh; the model's config asks for the exact form")
    return Description({f"{family.arch}.{key}": value for key, value in values.items()}, rope, notes)


def head_dim_of(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check(family: Family, config: PretrainedConfig) -> None:
    """Refuses what llama.cpp would compute differently."""
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    width = config.hidden_size // config.num_attention_heads
    wanted: dict[str, tuple[Any, tuple[Any, ...]]] = {"activation": (activation, family.activation)}
    for option, values in family.assumes.items():
        wanted[option] = getattr(config, option, values[0]), values
    if hasattr(config, "query_pre_attn_scalar"):
        by_width = config.num_hidden_layers == family.scaled_by_width
        wanted["query_pre_attn_scalar"] = config.query_pre_attn_scalar, (width if by_width else head_dim_of(config),)
    if family.head_is_width:
        wanted["head_dim"] = head_dim_of(config), (width,)
    for option, (value, values) in wanted.items():
        if value not in values:
            raise _refused(f"its {option} is {value!r}, and llama.cpp always uses {values[0]!r}")
    for option in family.soft_caps:
        if not getattr(config, option, None):
            raise _refused(f"it has no {option}, and llama.cpp always applies one")


def _refused(why: str) -> TrilloraError:
    return TrilloraError(f"This model cannot be written as GGUF: {why}.", where=WHERE, do=OTHER_WAY)


def _context(family: Family, config: PretrainedConfig) -> tuple[int, tuple[str, ...]]:
    """The number of positions for which llama.cpp computes what the model computes."""
    num_positions, window = config.max_position_embeddings, _smallest_window(config)
    if family.window or window is None or window >= num_positions:
        return num_positions, ()
    note = f"llama.cpp has no sliding window for this family: the context is {window} tokens instead of {num_positions}"
    return window, (note,)


def _smallest_window(config: PretrainedConfig) -> int | None:
    """The sliding window if some layer has one. Up to this length, it changes nothing."""
    window = getattr(config, "sliding_window", None)
    layers = getattr(config, "layer_types", None) or ()
    is_used = "sliding_attention" in layers if layers else getattr(config, "use_sliding_window", True)
    return window if window and is_used else None


def _window(config: PretrainedConfig) -> dict[str, int]:
    """The window, and after how many layers one without it follows: llama.cpp has full attention in the last layer of
    each period."""
    is_full = [kind == "full_attention" for kind in config.layer_types]
    period = is_full.index(True) + 1 if any(is_full) else len(is_full) + 1
    if is_full != [(layer + 1) % period == 0 for layer in range(len(is_full))]:
        raise _refused("its layers with a sliding window do not repeat as llama.cpp expects")
    if period == 1:
        raise _refused("none of its layers has a sliding window")
    return {"attention.sliding_window": config.sliding_window, "attention.sliding_window_pattern": period}


def _experts(config: PretrainedConfig) -> dict[str, int]:
    num_experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not num_experts:
        return {}
    sizes = {
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
        "expert_shared_feed_forward_length": getattr(config, "shared_expert_intermediate_size", None),
    }
    counts = {"expert_count": num_experts, "expert_used_count": config.num_experts_per_tok}
    return counts | {key: size for key, size in sizes.items() if size}


def _caps(family: Family, config: PretrainedConfig) -> dict[str, float]:
    keys = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
    found = {key: getattr(config, option, None) for option, key in keys.items()}
    if not family.soft_caps and not family.may_cap and any(found.values()):
        raise _refused("it has soft caps, which llama.cpp does not apply in this family")
    return {key: float(cap) for key, cap in found.items() if cap}
