"""transformers' attention and mask interfaces, implemented with `engine.attention`.

Our mask function returns a `MaskRule` instead of a T x S tensor. transformers passes it on to our attention function,
which builds what its kernel needs from the rule and the segment ids of the trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import torch
import torch.utils._pytree as torch_tree
from jax.sharding import PartitionSpec
from torchax import interop
from transformers import masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trillora.devices.mesh import BATCH_AXES, TENSOR_AXIS, per_shard
from trillora.engine.attention import MaskRule, RuleChoice, ScoreScaling, attend, visible
from trillora.engine.ragged import BlockDocuments
from trillora.errors import TrilloraError
from trillora.model.kv_cache import visible_in_cache
from trillora.model.overrides.recurrent import modelling_files
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import Replacement, Trace, current

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

NAME = "trillora"
HARMLESS_KEYWORDS = frozenset({"position_ids", "cache_position"})  # already applied to queries, keys and segment ids
Style = Literal["interface", "mask", "none"]


def register() -> None:
    """Registers `attn_implementation="trillora"` with transformers. May be called more than once."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _mask_rule)


def choose_style(model: torch.nn.Module) -> Style:
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


def mask_replacements(model: torch.nn.Module, style: Style) -> list[Replacement]:
    """Replacements (module, name, value) of mask functions during a trace."""
    # The original branches on the values of the positions, which cannot be traced; segment ids replace it.
    replacements: list[Replacement] = [(masking_utils, "find_packed_sequence_indices", lambda positions: None)]
    if style == "mask":
        files = [file for file in modelling_files(model) if hasattr(file, "create_causal_mask")]
        replacements += [(file, "create_causal_mask", _explicit_mask) for file in files]
    elif style == "none":
        classes = {type(m) for m in model.modules() if hasattr(m, "_attn")}
        replacements += [(cls, "_attn", _with_mask(cls._attn)) for cls in classes]
    return replacements


def _with_mask(attn: Callable[..., object]) -> Callable[..., object]:
    """The oldest models have a causal mask in a buffer, and get no other mask: add one that keeps documents apart."""

    @functools.wraps(attn)
    def masked(
        self: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> Any:
        if not args or args[0] is not None or not isinstance(value, TORCHAX_TENSORS):
            return attn(self, query, key, value, *args, **kwargs)
        return attn(self, query, key, value, _explicit_mask(None, value.transpose(1, 2)), *args[1:], **kwargs)

    return masked


def _explicit_mask(
    config: PretrainedConfig, inputs_embeds: torch.Tensor, *args: object, **kwargs: object
) -> torch.Tensor:
    """The causal mask, with documents kept apart, as an additive [B, 1, T, T] tensor."""
    trace = current()
    assert trace is not None, "this mask only works inside a trace"
    embedded = interop.jax_view(inputs_embeds)
    B, T = embedded.shape[:2]
    mask = jnp.where(visible(MaskRule(), T, T, trace.segments_BT), 0.0, jnp.finfo(embedded.dtype).min)
    return interop.torch_view(jnp.broadcast_to(mask, (B, T, T))[:, None].astype(embedded.dtype))


@dataclasses.dataclass(frozen=True)
class TensorOnDemand(MaskRule):
    """A rule that also acts as a boolean mask tensor [B, 1, T, S], for models whose own code reads the mask: indexers
    that choose keys, for example. The tensor is only computed when it is used."""

    num_sequences: int = 1
    num_queries: int = 0
    num_keys: int = 0

    def tensor(self) -> torch.Tensor:
        return interop.torch_view(self.__jax_array__())

    def __jax_array__(self) -> jax.Array:
        trace = current()
        assert trace is not None, "this mask only works inside a trace"
        if trace.slots is not None:
            mask = visible_in_cache(self, trace.slots, self.num_keys)
        else:
            mask = visible(self, self.num_queries, self.num_keys, trace.segments_BT)[:, None]
        return jnp.broadcast_to(mask, (self.num_sequences, *mask.shape[1:]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # protocols such as copying ask for these
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.tensor()[index]

    def __and__(self, other: torch.Tensor) -> torch.Tensor:
        return self.tensor() & other

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called for torch functions with a rule among their arguments, such as `torch.where(rule, a, b)`."""
        given = torch_tree.tree_map(lambda a: a.tensor() if isinstance(a, cls) else a, (args, kwargs or {}))
        return function(*given[0], **given[1])


def _mask_rule(
    batch_size: int = 1,
    q_length: int = 0,
    kv_length: int = 0,
    *args: object,
    mask_function: Callable[..., object] | None = None,
    local_size: int | None = None,
    **kwargs: object,
) -> MaskRule:
    """transformers builds a mask function out of closures; their names show which kind of mask it is."""
    names = _closure_names(mask_function) if mask_function is not None else set()
    rule = functools.partial(TensorOnDemand, num_sequences=batch_size, num_queries=q_length, num_keys=kv_length)
    if any("chunked_overlay" in name for name in names):
        return rule(chunk=local_size)
    if any("sliding_window_overlay" in name for name in names):
        return rule(window=local_size)
    return rule(causal=not any("bidirectional" in name for name in names))


def _closure_names(function: Callable[..., object], depth: int = 0) -> set[str]:
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
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """transformers gives [B, heads, T, width] and expects [B, T, heads, width]. `indices`: the keys that an indexer
    chose for each query; `block_indices`: their mask (see `indexers`), with a head for each head of the keys."""
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
                do="choose an architecture from docs/models.md: masks of this kind are not supported yet",
            )
    elif trace.slots is not None:
        raise TrilloraError(
            f"{type(module).__name__} builds its own mask, which does not cover the slots of a cache.",
            do="choose another architecture for generation; this one can only be trained",
        )
    elif attention_mask is not None:
        bias = interop.jax_view(attention_mask)
        if query.shape[2] != key.shape[2]:  # keys that are not tokens: the model has combined their mask with our rule
            rule = MaskRule(causal=False)
    if position_bias is not None:
        assert bias is None, "a tensor mask together with a position bias"
        bias = interop.jax_view(position_bias)
    if indices is not None:
        assert bias is None, "a tensor mask together with chosen keys"
        bias = _chosen(interop.jax_view(indices), key.shape[2])
    if block_indices is not None:
        assert bias is None and block_indices.dtype == torch.bool, "indexers return masks in a trace"
        bias = interop.jax_view(block_indices.repeat_interleave(query.shape[1] // block_indices.shape[1], dim=1))
    q, k, v = (interop.jax_view(t).swapaxes(1, 2) for t in (query, key, value))
    scores = ScoreScaling(scale=q.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap=softcap)
    sinks = None if s_aux is None else interop.jax_view(s_aux)
    return interop.torch_view(_attend_per_shard(trace, q, k, v, rule, scores, sinks, bias)), None


def _chosen(index_BTN: jax.Array, num_keys: int) -> jax.Array:
    """A boolean mask [B, 1, T, S] of the keys that are listed for each query."""
    B, T, _ = index_BTN.shape
    rows, queries = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    return jnp.zeros((B, T, num_keys), bool).at[rows, queries, index_BTN].set(True)[:, None]


def _refuse_unknown(module: torch.nn.Module, keywords: Mapping[str, object]) -> None:
    """Refuses unknown tensors. One may be part of the attention rule, such as the keys selected by an indexer, and
    ignoring it would silently give wrong numbers."""
    unknown = [name for name, v in keywords.items() if isinstance(v, torch.Tensor) and name not in HARMLESS_KEYWORDS]
    if unknown:
        raise TrilloraError(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, which is not supported yet.",
            do="choose an architecture from docs/models.md",
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
        documents: BlockDocuments | None,
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
            documents=documents,
            bias_BHTS=bias_BHTS,
            implementation=trace.attention,
            interpret=trace.interpret,
            mapped=trace.mapped,
        )

    index = rule.index if isinstance(rule, RuleChoice) else None
    segments, documents = trace.segments_BT, trace.documents
    if query_BTHD.shape[1] != key_BSKD.shape[1]:  # the bias contains them
        segments = documents = None
    args = (query_BTHD, key_BSKD, value_BSKE, sinks_H, segments, trace.positions_BT, documents, index)
    if trace.mesh is None or trace.attention == "xla" or bias_BHTS is not None:
        return local(*args)
    split_heads = key_BSKD.shape[2] % trace.mesh.shape[TENSOR_AXIS] == 0
    heads = TENSOR_AXIS if split_heads else None
    rows = PartitionSpec(BATCH_AXES, None, heads, None)
    tokens = PartitionSpec(BATCH_AXES, None)
    in_specs = (rows, rows, rows, PartitionSpec(heads), tokens, tokens, tokens, PartitionSpec())
    return per_shard(local, trace.mesh, in_specs, rows)(*args)
