"""Attention in all the forms that models use: a reference in plain XLA, and two kernels tested against it.

Example: four tokens, one head of width 1. Queries and keys are zero, so each output is the mean of the visible values.

    >>> zeros = jnp.zeros((1, 4, 1, 1))
    >>> values = jnp.array([10.0, 20.0, 30.0, 40.0]).reshape(1, 4, 1, 1)
    >>> attend(zeros, zeros, values, MaskRule(), ScoreScaling(1.0)).ravel()  # causal
    [10. 15. 20. 25.]
    >>> attend(zeros, zeros, values, MaskRule(window=2), ScoreScaling(1.0)).ravel()
    [10. 15. 25. 35.]
    >>> segments = jnp.array([[1, 1, 2, 2]])  # two documents packed into one sequence
    >>> attend(zeros, zeros, values, MaskRule(), ScoreScaling(1.0), segments_BT=segments).ravel()
    [10. 15. 30. 35.]

| implementation | where | what it does not support (`xla` is used instead) |
|---|---|---|
| `xla` | everywhere | nothing |
| `splash` | TPU: the kernel of jax (`engine.splash`) | an additive bias |
| `cudnn` | NVIDIA GPUs from Ampere on | soft caps, sinks, float32, E other than D, odd T, D > 256 (Ampere: D > 128) |

Segment ids keep the documents of a packed sequence apart. Chunked attention uses them too: each chunk of a document
gets a segment id of its own. cuDNN gets a mask of them, or, if it is known how many documents there can be, their
places and lengths (`engine.ragged`): then it skips what a mask would only hide.

Legend: B sequences, T query tokens, S key tokens, H query heads, K key/value heads, D key width, E value width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

from trillora.engine.ragged import BlockDocuments, find_documents, ragged_function, why_masked
from trillora.engine.splash import splash_kernel

Implementation = Literal["xla", "splash", "cudnn"]
MASKED = -1e30  # finite, so that a query without visible keys gives a mean instead of NaN
SAVED_NAME = "attention"  # the name of the output in remat policies
SPLASH_LANES = 128  # the kernel's block sizes are multiples of this
SPLASH_PADDING = -1  # segment id of the tokens that pad a sequence to whole blocks; no real token has it


@dataclass(frozen=True)
class MaskRule:
    """Which keys a query attends to, as a rule instead of a T x S array."""

    causal: bool = True
    window: int | None = None  # a query sees itself and the window - 1 tokens before it
    chunk: int | None = None  # a query sees only the tokens of its own chunk of this length


@dataclass(frozen=True)
class RuleChoice:
    """Several rules, one of which is selected at run time. Layers that differ only in their rule can then share one
    scan body."""

    rules: tuple[MaskRule, ...]
    index: jax.Array  # a scalar: the rule to use


@dataclass(frozen=True)
class ScoreScaling:
    """How the matmuls of queries and keys become logits: scaled, then optionally soft-capped."""

    scale: float
    softcap: float | None = None


def attend(
    query_BTHD: jax.Array,
    key_BSKD: jax.Array,
    value_BSKE: jax.Array,
    rule: MaskRule | RuleChoice,
    scores: ScoreScaling,
    *,
    sinks_H: jax.Array | None = None,
    segments_BT: jax.Array | None = None,
    positions_BT: jax.Array | None = None,
    documents: BlockDocuments | None = None,
    bias_BHTS: jax.Array | None = None,
    implementation: Implementation = "xla",
    interpret: bool = False,
    mapped: bool = False,
) -> jax.Array:
    """Attention output [B, T, H, E]. Uses the reference if `implementation` does not support this form.

    `documents`: where the documents of `segments_BT` are; None if a sequence may have any number of them. `interpret`
    runs the TPU kernel in the Pallas interpreter, on any backend, for tests. `mapped`: the call is inside `jax.vmap`.
    """
    if isinstance(rule, RuleChoice):
        if implementation == "xla":  # selects between masks, which is cheaper than a branch for each attention
            out = _reference(query_BTHD, key_BSKD, value_BSKE, rule, scores, sinks_H, segments_BT, bias_BHTS)
            return checkpoint_name(out, SAVED_NAME)
        branch = functools.partial(
            attend,
            scores=scores,
            sinks_H=sinks_H,
            segments_BT=segments_BT,
            positions_BT=positions_BT,
            documents=documents,
            bias_BHTS=bias_BHTS,
            implementation=implementation,
            interpret=interpret,
            mapped=mapped,
        )
        branches = [functools.partial(branch, rule=one) for one in rule.rules]
        return checkpoint_name(jax.lax.switch(rule.index, branches, query_BTHD, key_BSKD, value_BSKE), SAVED_NAME)
    num_tokens = query_BTHD.shape[1]
    if rule.chunk is not None and rule.chunk < num_tokens:  # else every document is one chunk
        segments_BT = refine_by_chunk(segments_BT, positions_BT, rule.chunk, query_BTHD.shape[:2])
        if documents is not None:  # in a block, each chunk begins with a document or a chunk's length after another
            block = documents.block_of(segments_BT.shape)
            documents = find_documents(segments_BT, block, documents.most + block // rule.chunk + 1)
    if unsupported(implementation, query_BTHD, key_BSKD, value_BSKE, rule, scores, sinks_H, bias_BHTS):
        implementation = "xla"
    if implementation == "splash":  # names its output itself, before it changes the layout
        return _splash(query_BTHD, key_BSKD, value_BSKE, rule, scores, sinks_H, segments_BT, interpret)
    if implementation == "cudnn":
        num_heads, num_key_heads = query_BTHD.shape[2], key_BSKD.shape[2]
        if documents is not None and not why_masked(num_heads, num_key_heads, causal=rule.causal, mapped=mapped):
            out = _ragged(query_BTHD, key_BSKD, value_BSKE, rule, scores, documents)
        else:
            out = _cudnn(query_BTHD, key_BSKD, value_BSKE, rule, scores, segments_BT, mapped)
    else:
        out = _reference(query_BTHD, key_BSKD, value_BSKE, rule, scores, sinks_H, segments_BT, bias_BHTS)
    return checkpoint_name(out, SAVED_NAME)


def refine_by_chunk(
    segments_BT: jax.Array | None, positions_BT: jax.Array | None, chunk: int, shape: tuple[int, ...]
) -> jax.Array:
    """Segment ids that are equal for two tokens only if they have the same document and the same chunk.

    With chunk = 2, segments [1 1 1 2 2] and positions [0 1 2 0 1] give [3 3 4 6 6].
    """
    num_tokens = shape[1]
    positions = jnp.arange(num_tokens)[None] if positions_BT is None else positions_BT
    chunks = jnp.broadcast_to(positions // chunk, shape).astype(jnp.int32)
    if segments_BT is None:
        return chunks
    return segments_BT * (num_tokens // chunk + 1) + chunks


def unsupported(
    implementation: Implementation,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    rule: MaskRule,
    scores: ScoreScaling,
    sinks: jax.Array | None,
    bias: jax.Array | None,
) -> str | None:
    """Why the implementation does not support this form of attention; None if it does."""
    if implementation == "xla":
        return None
    if bias is not None:
        return "an additive bias"
    if query.shape[1] != key.shape[1]:
        return "queries and keys of different length"
    if implementation == "splash":
        return None if rule.causal else "a mask that is not causal"
    if scores.softcap is not None or sinks is not None:
        return "soft-capped scores or attention sinks"
    if query.shape[1] % 2:
        return "an odd number of tokens"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{query.dtype} (only bfloat16 and float16)"
    if value.shape[-1] != query.shape[-1] or query.shape[-1] % 8 or query.shape[-1] > 256:
        return f"heads of width {query.shape[-1]} with values of width {value.shape[-1]}"
    return None


def visible(rule: MaskRule | RuleChoice, num_queries: int, num_keys: int, segments_BT: jax.Array | None) -> jax.Array:
    """The rule as a boolean array [1 or B, T, S]."""
    if isinstance(rule, RuleChoice):
        return jax.lax.select_n(rule.index, *(visible(one, num_queries, num_keys, segments_BT) for one in rule.rules))
    query_index = jnp.arange(num_queries)[:, None]
    key_index = jnp.arange(num_keys)[None, :]
    mask = jnp.ones((num_queries, num_keys), bool)
    if rule.causal:
        mask &= key_index <= query_index
    if rule.window is not None:
        mask &= query_index - key_index < rule.window
    if segments_BT is None:
        return mask[None]
    return mask[None] & (segments_BT[:, :, None] == segments_BT[:, None, :])


def _reference(
    query_BTHD: jax.Array,
    key_BSKD: jax.Array,
    value_BSKE: jax.Array,
    rule: MaskRule | RuleChoice,
    scores: ScoreScaling,
    sinks_H: jax.Array | None,
    segments_BT: jax.Array | None,
    bias_BHTS: jax.Array | None,
) -> jax.Array:
    """Plain XLA. Query heads are grouped by the key head they share, so keys are not repeated in memory."""
    B, T, H, D = query_BTHD.shape
    S, K = key_BSKD.shape[1:3]
    query = query_BTHD.reshape(B, T, K, H // K, D)
    logits = jnp.einsum("btkgd,bskd->bkgts", query, key_BSKD, preferred_element_type=jnp.float32) * scores.scale
    if scores.softcap is not None:
        logits = jnp.tanh(logits / scores.softcap) * scores.softcap
    if bias_BHTS is not None:
        bias = jnp.where(bias_BHTS, 0.0, MASKED) if bias_BHTS.dtype == jnp.bool_ else bias_BHTS
        bias = jnp.broadcast_to(bias, (bias.shape[0], H, T, S)).reshape(-1, K, H // K, T, S)
        logits = logits + bias.astype(jnp.float32)
    logits = jnp.where(visible(rule, T, S, segments_BT)[:, None, None], logits, MASKED)
    if sinks_H is None:
        weights = jax.nn.softmax(logits, axis=-1)
    else:
        sink = jnp.broadcast_to(sinks_H.astype(jnp.float32).reshape(1, K, H // K, 1, 1), (*logits.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([logits, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("bkgts,bske->btkge", weights.astype(value_BSKE.dtype), value_BSKE)
    return out.reshape(B, T, H, value_BSKE.shape[-1])


def _cudnn(
    query_BTHD: jax.Array,
    key_BSKD: jax.Array,
    value_BSKE: jax.Array,
    rule: MaskRule,
    scores: ScoreScaling,
    segments_BT: jax.Array | None,
    mapped: bool,
) -> jax.Array:
    if segments_BT is None:
        mask = None
        causal, window = rule.causal, None if rule.window is None else (rule.window - 1, 0)
    else:
        mask, causal, window = visible(rule, query_BTHD.shape[1], key_BSKD.shape[1], segments_BT)[:, None], False, None
        if mapped:  # jax cannot map a mask that all heads share (seen with 0.11.2)
            B, T, H, _ = query_BTHD.shape
            mask = jnp.broadcast_to(mask, (B, H, T, key_BSKD.shape[1]))
    return jax.nn.dot_product_attention(
        query_BTHD,
        key_BSKD,
        value_BSKE,
        mask=mask,
        scale=scores.scale,
        is_causal=causal,
        local_window_size=window,
        implementation="cudnn",
    )


def _ragged(
    query_BTHD: jax.Array,
    key_BSKD: jax.Array,
    value_BSKE: jax.Array,
    rule: MaskRule,
    scores: ScoreScaling,
    documents: BlockDocuments,
) -> jax.Array:
    """cuDNN with the places and lengths of the documents instead of a mask."""
    attention = ragged_function()
    assert attention is not None, "`why_masked` says so"
    return attention(query_BTHD, key_BSKD, value_BSKE, documents, scores.scale, rule.window)


def _splash(
    query_BTHD: jax.Array,
    key_BSKD: jax.Array,
    value_BSKE: jax.Array,
    rule: MaskRule,
    scores: ScoreScaling,
    sinks_H: jax.Array | None,
    segments_BT: jax.Array | None,
    interpret: bool,
) -> jax.Array:
    """The kernel takes [heads, tokens, width] of one sequence: `vmap` adds the batch, and tokens are padded to whole
    blocks."""
    B, T, H, _ = query_BTHD.shape
    padding = -T % (SPLASH_LANES if T <= 512 else 512)  # long sequences run faster with long blocks
    if padding and segments_BT is None:
        segments_BT = jnp.zeros((B, T), jnp.int32)
    if segments_BT is not None:
        segments_BT = jnp.pad(segments_BT, ((0, 0), (0, padding)), constant_values=SPLASH_PADDING)

    def heads_first(array: jax.Array) -> jax.Array:
        return jnp.pad(array, ((0, 0), (0, padding), (0, 0), (0, 0))).swapaxes(1, 2)

    query = heads_first((query_BTHD * scores.scale).astype(query_BTHD.dtype))
    width = max(query_BTHD.shape[-1], value_BSKE.shape[-1])
    largest_block = 1024 if width <= 256 else 512  # wider heads overflow the chip's vector memory
    kernel = splash_kernel(H, T + padding, rule.window, scores.softcap, largest_block, SAVED_NAME, interpret)
    extra: dict[str, Any] = {} if sinks_H is None else {"sinks": sinks_H}

    def one_sequence(query: jax.Array, key: jax.Array, value: jax.Array, segments: jax.Array | None) -> jax.Array:
        ids = None if segments is None else splash.SegmentIds(q=segments, kv=segments)
        return kernel(query, key, value, segment_ids=ids, **extra)

    in_axes = (0, 0, 0, None if segments_BT is None else 0)
    out = jax.vmap(one_sequence, in_axes=in_axes)(query, heads_first(key_BSKD), heads_first(value_BSKE), segments_BT)
    return out.swapaxes(1, 2)[:, :T].astype(value_BSKE.dtype)
