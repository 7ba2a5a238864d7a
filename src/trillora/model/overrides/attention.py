"""transformers' attention and mask interfaces, implemented with `engine.attention`.

Our mask function returns a `MaskRule` instead of a T x S tensor. transformers passes it on to our attention function,
which builds what its kernel needs from the rule and the segment ids of the trace.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from torchax import interop
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trillora.devices.mesh import BATCH_AXES, TENSOR_AXIS, per_shard
from trillora.engine.attention import SAVED_NAME, MaskRule, RuleChoice, ScoreScaling, attend, visible
from trillora.errors import TrilloraError
from trillora.model.kv_cache import visible_in_cache
from trillora.model.overrides.recurrent import modelling_files
from trillora.model.trace import Trace, current

NAME = "trillora"
HARMLESS_KEYWORDS = frozenset({"position_ids", "cache_position"})  # already applied to queries, keys and segment ids
Style = Literal["interface", "mask", "none"]


def register() -> None:
    """Registers `attn_implementation="trillora"` with transformers. May be called more than once."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask_rule)


def choose_style(model: Any) -> Style:
    """How we control this model's attention. "interface": it calls our attention function through transformers'
    interface. "mask": it computes attention in its own code, so we only replace the mask. "none": it has no attention.
    """
    files = modelling_files(model)
    if any(hasattr(file, "ALL_ATTENTION_FUNCTIONS") for file in files):
        text = model.config.get_text_config()
        # In a multimodal model, only for the text model: transformers warns about parts that are not there.
        of_text = [name for name in model.config.sub_configs if getattr(model.config, name, None) is text]
        model.set_attn_implementation({"": NAME, **dict.fromkeys(of_text, NAME)} if of_text else NAME)
        return "interface"
    return "mask" if any(hasattr(file, "create_causal_mask") for file in files) else "none"


def mask_replacements(model: Any, style: Style) -> list[tuple[Any, str, Any]]:
    """Replacements (module, name, value) of mask functions during a trace."""
    # The original branches on the values of the positions, which cannot be traced; segment ids replace it.
    replacements: list[tuple[Any, str, Any]] = [(masking_utils, "find_packed_sequence_indices", lambda positions: None)]
    if style == "mask":
        files = [file for file in modelling_files(model) if hasattr(file, "create_causal_mask")]
        replacements += [(file, "create_causal_mask", _explicit_mask) for file in files]
    return replacements


def _explicit_mask(config: Any, inputs_embeds: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The causal mask, with documents kept apart, as an additive [B, 1, T, T] tensor."""
    trace = current()
    assert trace is not None, "this mask only works inside a trace"
    embedded = interop.jax_view(inputs_embeds)
    B, T = embedded.shape[:2]
    mask = jnp.where(visible(MaskRule(), T, T, trace.segments_BT), 0.0, jnp.finfo(embedded.dtype).min)
    return interop.torch_view(jnp.broadcast_to(mask, (B, T, T))[:, None].astype(embedded.dtype))


def _mask_rule(
    *args: Any, mask_function: Callable[..., Any] | None = None, local_size: int | None = None, **kwargs: Any
) -> MaskRule:
    """transformers builds a mask function out of closures; their names show which kind of mask it is."""
    names = _closure_names(mask_function) if mask_function is not None else set()
    if any("chunked_overlay" in name for name in names):
        return MaskRule(chunk=local_size)
    if any("sliding_window_overlay" in name for name in names):
        return MaskRule(window=local_size)
    return MaskRule(causal=not any("bidirectional" in name for name in names))


def _closure_names(function: Callable[..., Any], depth: int = 0) -> set[str]:
    names = {getattr(function, "__qualname__", "")}
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        for inner in content if isinstance(content, tuple | list) else (content,):
            if callable(inner) and depth < 6:
                names |= _closure_names(inner, depth + 1)
    return names


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers gives [B, heads, T, width] and expects [B, T, heads, width]."""
    trace = current()
    assert trace is not None, "this attention only works inside a trace"
    trace.num_attention_calls += 1
    _refuse_unknown(module, kwargs)
    # If rule and keyword disagree, the rule is right: a few models pass a window to layers that do not use it.
    rule: MaskRule | RuleChoice = MaskRule(window=sliding_window)
    bias: jax.Array | None = None
    if isinstance(attention_mask, MaskRule | RuleChoice):
        rule = attention_mask
        if trace.slots is not None:
            assert isinstance(rule, MaskRule), "layers run one by one while decoding"
            rule, bias = MaskRule(causal=False), visible_in_cache(rule, trace.slots, key.shape[2])
        elif query.shape[2] != key.shape[2]:
            raise TrilloraError(
                f"{type(module).__name__} attends {query.shape[2]} tokens to {key.shape[2]} keys of its own.",
                do="choose an architecture from docs/ARCHITECTURES.md: masks of this kind are not supported yet",
            )
    elif trace.slots is not None:
        raise TrilloraError(
            f"{type(module).__name__} builds its own mask, which does not cover the slots of a cache.",
            do="choose another architecture for generation; this one can only be trained",
        )
    elif attention_mask is not None:
        bias = interop.jax_view(attention_mask)
    if position_bias is not None:
        assert bias is None, "a tensor mask together with a position bias"
        bias = interop.jax_view(position_bias)
    q, k, v = (interop.jax_view(t).swapaxes(1, 2) for t in (query, key, value))
    scores = ScoreScaling(scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap=softcap)
    sinks = None if s_aux is None else interop.jax_view(s_aux)
    out = _attend_per_shard(trace, q, k, v, rule, scores, sinks, bias)
    return interop.torch_view(checkpoint_name(out, SAVED_NAME)), None


def _refuse_unknown(module: torch.nn.Module, keywords: dict[str, Any]) -> None:
    """Refuses unknown tensors. One may be part of the attention rule, such as the keys selected by an indexer, and
    ignoring it would silently give wrong numbers."""
    unknown = [name for name, v in keywords.items() if isinstance(v, torch.Tensor) and name not in HARMLESS_KEYWORDS]
    if unknown:
        raise TrilloraError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, which is not supported yet.",
            do="choose an architecture from docs/ARCHITECTURES.md",
        )


def _attend_per_shard(
    trace: Trace,
    query_BTHD: jax.Array,
    key_BSKD: jax.Array,
    value_BSKE: jax.Array,
    rule: MaskRule | RuleChoice,
    scores: ScoreScaling,
    sinks_H: jax.Array | None,
    bias_BHTS: jax.Array | None,
) -> jax.Array:
    """XLA can partition its own attention but not a kernel: each device runs the kernel on its sequences and heads."""

    def local(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        sinks: jax.Array | None,
        segments: jax.Array | None,
        positions: jax.Array | None,
        index: jax.Array | None,
    ) -> jax.Array:
        return attend(
            query,
            key,
            value,
            rule if index is None or isinstance(rule, MaskRule) else dataclasses.replace(rule, index=index),
            scores,
            sinks_H=sinks,
            segments_BT=segments,
            positions_BT=positions,
            bias_BHTS=bias_BHTS,
            implementation=trace.attention,
            interpret=trace.interpret,
            mapped=trace.mapped,
        )

    index = rule.index if isinstance(rule, RuleChoice) else None
    args = (query_BTHD, key_BSKD, value_BSKE, sinks_H, trace.segments_BT, trace.positions_BT, index)
    if trace.mesh is None or trace.attention == "xla" or bias_BHTS is not None:
        return local(*args)
    split_heads = key_BSKD.shape[2] % trace.mesh.shape[TENSOR_AXIS] == 0
    heads = TENSOR_AXIS if split_heads else None
    rows = PartitionSpec(BATCH_AXES, None, heads, None)
    tokens = PartitionSpec(BATCH_AXES, None)
    in_specs = (rows, rows, rows, PartitionSpec(heads), tokens, tokens, PartitionSpec())
    return per_shard(local, trace.mesh, in_specs, rows)(*args)
