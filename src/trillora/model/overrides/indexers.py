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
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import current


def block_indexers(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    """Replacements (class, name, value) for the indexers of a model."""
    classes = {type(module) for module in model.modules() if hasattr(module, "build_block_mask")}
    return [(cls, "forward", _chosen_keys(cls.forward)) for cls in classes]


def _chosen_keys(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a mask [B, H, T, S] of the keys in the chosen blocks, instead of the indices of the blocks."""

    def forward(
        self: Any, hidden_states: torch.Tensor, position_embeddings: Any, past_key_values: Any, position_ids: Any
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


def choose_blocks(
    scores_BHTS: jax.Array, position_BT: jax.Array, visible_BTS: jax.Array, size: int, num_chosen: int, num_local: int
) -> jax.Array:
    """The keys of the `num_chosen` blocks with the largest scores, as a boolean array [B, H, T, S]. A block's score is
    that of its best visible key; the `num_local` blocks that end at the query's own come first."""
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
