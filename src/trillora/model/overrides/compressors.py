"""Keys that stand for several tokens: windows that begin at every document's first token.

Some models make one more key out of every `rate` tokens. transformers' own code counts these windows from the first
slot of a sequence, so in a packed sequence a window would contain tokens of two documents. Example with windows of 2
tokens, and documents of 3 and 2 tokens; the third token is in no complete window:

    slot        0  1  2  3  4
    position    0  1  2  0  1
    window      0  0     1  1

Legend: B sequences, T tokens, N windows, R tokens of a window, P windows that contribute to a key, D width.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop

from trillora.model.overrides.attention import TensorOnDemand
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import Replacement, current


@dataclass(frozen=True)
class Windows:
    """The complete windows of all documents. A sequence has room for T // R; unused ones are visible to no token."""

    end_BN: jax.Array  # slot of the last token
    first_BN: jax.Array  # position of the first token in its document
    visible_BTN: jax.Array  # which tokens may attend to the window: from its last token to the end of its document


def window_keys(model: torch.nn.Module) -> list[Replacement]:
    """Replacements (class, name, value) for the attention and the compressors of a model."""
    replacements: list[Replacement] = []
    for cls, module in {type(module): module for module in model.modules()}.items():
        if hasattr(module, "compressor"):
            replacements.append((cls, "forward", _with_mask_tensor(cls.forward)))
        if hasattr(module, "compress_rate") and not hasattr(module, "scorer"):
            replacements.append((cls, "forward", _compress(cls.forward)))
    return replacements


def _with_mask_tensor(original: Callable[..., object]) -> Callable[..., object]:
    """Attention that appends the compressor's mask to its own, which it can only do with a tensor."""

    @functools.wraps(original)
    def forward(
        self: torch.nn.Module, *args: object, attention_mask: torch.Tensor | None = None, **kwargs: object
    ) -> Any:
        if isinstance(attention_mask, TensorOnDemand) and self.compressor is not None:
            attention_mask = attention_mask.tensor()
        return original(self, *args, attention_mask=attention_mask, **kwargs)

    return forward


def _compress(original: Callable[..., object]) -> Callable[..., object]:
    """Returns the keys of all windows [B, 1, N, D] and a boolean mask [B, 1, T, N]."""

    def forward(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        cache: object,
        layer_idx: int,
    ) -> Any:
        trace = current()
        if trace is None or cache is not None or not isinstance(hidden_states, TORCHAX_TENSORS):
            return original(self, hidden_states, q_residual, position_ids, cache, layer_idx)
        positions = jnp.broadcast_to(interop.jax_view(position_ids), hidden_states.shape[:2])
        windows = complete_windows(positions, trace.segments_BT, self.compress_rate)
        mask = windows.visible_BTN
        if hasattr(self, "indexer"):
            mask = _chosen(self.indexer, hidden_states, q_residual, position_ids, windows)
        return _keys(self, hidden_states, windows).unsqueeze(1), interop.torch_view(mask[:, None])

    return forward


def complete_windows(position_BT: jax.Array, segments_BT: jax.Array | None, rate: int) -> Windows:
    T = position_BT.shape[1]
    is_end = position_BT % rate == rate - 1
    end_BN = jnp.argsort(~is_end, axis=1, stable=True)[:, : T // rate]
    exists, last = (jnp.take_along_axis(array, end_BN, axis=1) for array in (is_end, position_BT))
    visible = exists[:, None] & (end_BN[:, None] <= jnp.arange(T)[:, None])
    if segments_BT is not None:
        visible &= jnp.take_along_axis(segments_BT, end_BN, axis=1)[:, None] == segments_BT[..., None]
    return Windows(end_BN, jnp.maximum(last - (rate - 1), 0), visible)


def _keys(self: torch.nn.Module, hidden_states: torch.Tensor, windows: Windows) -> torch.Tensor:
    """The key of each window [B, N, D]: the sum of its tokens' values, weighted by their gates, at the position of its
    first token. If the projections are P times as wide as a key, the P - 1 windows before contribute too: the first
    part of the width belongs to the earliest."""
    values, gates = (interop.jax_view(project(hidden_states)) for project in (self.kv_proj, self.gate_proj))
    R, D = self.compress_rate, self.head_dim
    P = values.shape[-1] // D
    slots = jnp.maximum(windows.end_BN[..., None] - jnp.arange(P * R)[::-1], 0)

    def of_windows(array_BTX: jax.Array) -> jax.Array:
        gathered = jax.vmap(lambda row, at: row[at])(array_BTX, slots)
        return gathered.reshape(*windows.end_BN.shape, P, R, P, D)

    bias = interop.jax_view(self.position_bias).reshape(R, P, D)
    exists = windows.first_BN[..., None] >= R * jnp.arange(P)[::-1]  # of the windows before, in the same document
    gates = jnp.where(exists[..., None, None, None], of_windows(gates) + bias, -jnp.inf)
    values, gates = (
        interop.torch_view(jnp.concatenate([array[:, :, p, :, p] for p in range(P)], axis=2))
        for array in (of_windows(values), gates)
    )
    weights = gates.softmax(dim=2, dtype=torch.float32).to(values.dtype)
    key = self.kv_norm((values * weights).sum(dim=2))
    first = interop.torch_view(windows.first_BN)
    cos, sin = self.rotary_emb(key, position_ids=first, layer_type=self.rope_layer_type)
    return _rotate(self)(key.unsqueeze(1), cos, sin).squeeze(1)


def _rotate(module: torch.nn.Module) -> Callable[..., torch.Tensor]:
    rotate: Callable[..., torch.Tensor] = sys.modules[type(module).__module__].apply_rotary_pos_emb
    return rotate


def _chosen(
    indexer: Any, hidden_states: torch.Tensor, q_residual: torch.Tensor, position_ids: torch.Tensor, windows: Windows
) -> jax.Array:
    """The windows that an indexer chooses for each token, as a boolean array [B, T, N]."""
    B, T, _ = hidden_states.shape
    cos, sin = indexer.rotary_emb(hidden_states, position_ids=position_ids, layer_type=indexer.rope_layer_type)
    query = indexer.q_b_proj(q_residual).view(B, T, -1, indexer.head_dim).transpose(1, 2)
    query = _rotate(indexer)(query, cos, sin).transpose(1, 2)
    scores = interop.jax_view(indexer.scorer(query, _keys(indexer, hidden_states, windows), hidden_states))
    return best_windows(scores, windows, indexer.index_topk)


def best_windows(scores_BTN: jax.Array, windows: Windows, num_chosen: int) -> jax.Array:
    """The visible windows with the largest scores, as a boolean array [B, T, N]."""
    seen = jnp.where(windows.visible_BTN, jax.lax.stop_gradient(scores_BTN), -jnp.inf)
    values, index = jax.lax.top_k(seen, min(num_chosen, seen.shape[-1]))
    at = jnp.indices(index.shape, sparse=True)[:2]
    return jnp.zeros(seen.shape, bool).at[(*at, index)].max(values > -jnp.inf)
