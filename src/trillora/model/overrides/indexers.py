"""Indexers that choose whole blocks of keys, with blocks that begin at every document's first token.

transformers' own code counts blocks from the first slot of a sequence, so in a packed sequence a block would contain
tokens of two documents. Example with blocks of 2 tokens, and documents of 3 and 2 tokens:

    slot        0  1  2  3  4
    position    0  1  2  0  1
    block       0  0  1  2  2

Legend: B sequences, H heads, T queries, S keys, N blocks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop

from trillora.engine.attention import MaskRule, visible
from trillora.model.overrides.compressors import best_windows, complete_windows
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import Replacement, current


def block_indexers(model: torch.nn.Module) -> list[Replacement]:
    """Replacements (class, name, value) for the indexers of a model."""
    modules = list(model.modules())
    classes = {type(module) for module in modules if hasattr(module, "build_block_mask")}
    pooling = {type(module) for module in modules if hasattr(module, "index_qk_proj")}
    return [
        *((cls, "forward", _chosen_keys(cls.forward)) for cls in classes),
        *((cls, "forward", _chosen_by_mean(cls.forward)) for cls in pooling),
    ]


def _chosen_keys(original: Callable[..., object]) -> Callable[..., object]:
    """Returns a mask [B, H, T, S] of the keys in the chosen blocks, instead of the indices of the blocks."""

    def forward(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        past_key_values: Any,
        position_ids: torch.Tensor,
    ) -> Any:
        trace = current()
        if trace is None or past_key_values is not None or not isinstance(hidden_states, TORCHAX_TENSORS):
            return original(self, hidden_states, position_embeddings, past_key_values, position_ids)
        B, T, _ = hidden_states.shape
        query = self.q_norm(self.q_proj(hidden_states).view(B, T, -1, self.head_dim)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(B, T, 1, self.head_dim)).transpose(1, 2)
        cos, sin = (part[..., : self.head_dim] for part in position_embeddings)
        query, key = sys.modules[type(self).__module__].apply_rotary_pos_emb(query, key, cos, sin)
        scores = torch.matmul(query.float(), key.float().transpose(-1, -2))
        places = interop.jax_view(position_ids)
        mask = choose_blocks(
            jax.lax.stop_gradient(interop.jax_view(scores)),
            jnp.broadcast_to(places, (B, T)),
            visible(MaskRule(), T, T, trace.segments_BT),
            self.block_size,
            self.topk_blocks,
            self.local_blocks,
        )
        return interop.torch_view(mask)

    return forward


def _chosen_by_mean(original: Callable[..., object]) -> Callable[..., object]:
    """Returns a mask [B, 1, T, S]: complete blocks chosen by the mean of their keys, and the keys after the last one.
    transformers' own code is a loop over all queries."""

    def forward(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any,
    ) -> Any:
        trace = current()
        if trace is None or past_key_values is not None or not isinstance(hidden_states, TORCHAX_TENSORS):
            return original(self, hidden_states, position_embeddings, attention_mask, past_key_values)
        B, T, _ = hidden_states.shape
        width, size = self.index_head_dim, self.compress_ratio
        rotate = sys.modules[type(self).__module__].apply_rotary_pos_emb
        both = self.index_qk_proj(hidden_states).reshape(B, T, -1, width)
        query, (cos, sin) = self.q_layernorm(both[:, :, : self.index_n_heads]), position_embeddings
        query = rotate(query, cos=cos, sin=sin, unsqueeze_dim=2)
        places = jnp.arange(T)[None] if trace.positions_BT is None else trace.positions_BT
        windows = complete_windows(jnp.broadcast_to(places, (B, T)), trace.segments_BT, size)
        slots = jnp.maximum(windows.end_BN[..., None] - jnp.arange(size)[::-1], 0)
        keys = jax.vmap(lambda row, at: row[at])(interop.jax_view(both[:, :, self.index_n_heads]), slots)
        mean = keys.astype(jnp.float32).mean(axis=2).astype(keys.dtype)
        cos, sin = (
            interop.torch_view(jax.vmap(lambda row, at: row[at])(interop.jax_view(part), slots[..., 0]))
            for part in (cos, sin)
        )
        key = rotate(self.k_layernorm(interop.torch_view(mean)).unsqueeze(1), cos=cos, sin=sin)
        scores = torch.relu(torch.matmul(query.transpose(1, 2).float(), key.float().transpose(-1, -2))).sum(dim=1)
        chosen = best_windows(interop.jax_view(scores), windows, self.block_topk)
        mask = keys_of_windows(chosen, jnp.broadcast_to(places, (B, T)), size)
        return interop.torch_view(mask[:, None])

    return forward


def keys_of_windows(chosen_BTN: jax.Array, position_BT: jax.Array, size: int) -> jax.Array:
    """The keys of the chosen windows and those after a query's last complete window [B, T, S]. Keys of other documents
    may be among them: the mask of attention excludes them."""
    rest = position_BT[:, None] >= ((position_BT + 1) // size * size)[..., None]
    if chosen_BTN.shape[-1] == 0:
        return rest
    is_end = position_BT % size == size - 1
    window_BS = jnp.minimum(jnp.cumsum(is_end, axis=1) - is_end, chosen_BTN.shape[-1] - 1)
    return rest | jnp.take_along_axis(chosen_BTN, jnp.broadcast_to(window_BS[:, None], rest.shape), axis=-1)


def choose_blocks(
    scores_BHTS: jax.Array, position_BT: jax.Array, visible_BTS: jax.Array, size: int, num_chosen: int, num_local: int
) -> jax.Array:
    """The keys of the `num_chosen` blocks with the largest scores, as a boolean array [B, H, T, S]. A block's score is
    the score of its best visible key; the `num_local` blocks that end at the query's own come first."""
    T = scores_BHTS.shape[2]
    block_BT = jnp.cumsum(position_BT % size == 0, axis=1) - 1
    seen = jnp.where(visible_BTS[:, None], scores_BHTS, -jnp.inf)
    best_BNHT = jax.vmap(lambda one, block: jax.ops.segment_max(jnp.moveaxis(one, -1, 0), block, T))(seen, block_BT)
    best = jnp.moveaxis(best_BNHT, 1, -1)
    ordinal_BT = position_BT // size  # of the query's block in its document
    for back in range(num_local):
        local = block_BT - jnp.minimum(back, ordinal_BT)
        best = jnp.where(jax.nn.one_hot(local, T, dtype=bool)[:, None], jnp.inf, best)
    values, index = jax.lax.top_k(best, min(num_chosen, T))
    chosen = jnp.zeros(best.shape, bool)
    at = tuple(jnp.indices(index.shape, sparse=True)[:3])
    chosen = chosen.at[(*at, index)].max(values > -jnp.inf)
    return jnp.take_along_axis(chosen, jnp.broadcast_to(block_BT[:, None, None], scores_BHTS.shape), axis=-1)
