"""Where the documents of packed sequences are, in the form that cuDNN's ragged attention takes.

Example: a sequence with documents of 3 and 2 tokens and one token of padding, in a program for at most 4 documents:

    >>> found = find_documents(jnp.array([[1, 1, 1, 2, 2, 0]]), 4)
    >>> found.lengths_BM, found.starts_BN
    [[3 3 -1 -1]], [[0 3 -1 -1 -1]]    # -1: no document

The padding belongs to the last document: it comes after the document's tokens, so causal attention hides it from them,
and it needs no kernel call of its own. Its outputs are finite, and it has no part in the loss.

The function that takes these arrays is private in jax, so `ragged_function` looks at its signature first. jax's public
function only takes a mask, which costs memory and time for everything that it hides.

| jax | |
|---|---|
| 0.11.2 | outputs and gradients compared with the mask on an H200 |
| 0.11.1 | the same function |
| 0.7.2 to 0.11.0 | wrong places of the keys if several query heads share a key head: these models use the mask |

Legend: B sequences, T tokens, M documents at most, N = M + 1, H query heads, K key/value heads, D width.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

GROUPED_KEYS_SINCE = (0, 11, 1)  # the version of jax from which query heads may share key heads
ARGUMENTS = ("q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets", "scale", "mask_type", "sliding_window_length")
SMALLEST_BUCKET = 8


class Documents(NamedTuple):
    """The documents of each sequence, in order. Unused places are -1."""

    lengths_BM: jax.Array
    starts_BN: jax.Array  # always unused in the last place

    @property
    def most(self) -> int:
        """How many documents a sequence can have."""
        return self.lengths_BM.shape[1]


# query [B, T, H, D], key and value [B, T, K, D], documents, scale, window -> [B, T, H, D]
RaggedAttention = Callable[[jax.Array, jax.Array, jax.Array, Documents, float, int | None], jax.Array]


def documents_bucket(most: int) -> int:
    """The number of documents to compile for: 8, 16, 32 and so on, so that similar data share a program."""
    return max(SMALLEST_BUCKET, 1 << (most - 1).bit_length())


def find_documents(segments_BT: jax.Array, most: int) -> Documents:
    """Where the segments of each sequence are. A segment is a run of equal ids; the id 0 continues the run before it.
    No sequence may have more than `most` of them."""
    before_BT, after_BT = segments_BT[:, :-1], segments_BT[:, 1:]
    is_start_BT = jnp.pad((after_BT != before_BT) & (after_BT != 0), ((0, 0), (1, 0)), constant_values=True)
    number_BT = jnp.cumsum(is_start_BT, axis=1, dtype=jnp.int32) - 1
    # cuDNN takes the ragged layout from two documents on.
    lengths_BM = (number_BT[:, :, None] == jnp.arange(max(most, 2))).sum(axis=1, dtype=jnp.int32)
    starts_BM = jnp.cumsum(lengths_BM, axis=1, dtype=jnp.int32) - lengths_BM
    is_used_BM = lengths_BM > 0
    starts_BN = jnp.pad(jnp.where(is_used_BM, starts_BM, -1), ((0, 0), (0, 1)), constant_values=-1)
    return Documents(jnp.where(is_used_BM, lengths_BM, -1), starts_BN)


def why_masked(num_heads: int, num_key_heads: int, *, causal: bool = True, mapped: bool = False) -> str | None:
    """Why cuDNN needs a mask to keep documents apart in this form of attention; None if it takes their lengths."""
    if ragged_function() is None:
        return "this jax has no ragged attention that is known here"
    if mapped:
        return "several adapters at once, which jax cannot map over ragged attention"
    if not causal:
        return "a mask that is not causal"
    if num_heads != num_key_heads and jax.__version_info__ < GROUPED_KEYS_SINCE:
        return "query heads that share key heads (jax supports them from 0.11.1 on)"
    return None


@functools.cache
def ragged_function() -> RaggedAttention | None:
    """cuDNN's ragged attention; None if this jax does not have it in the form that is known here."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        function, mask_type = cudnn.dot_product_attention, cudnn.MaskType.PADDING_CAUSAL
    except (ImportError, AttributeError):
        return None
    if not inspect.signature(function).parameters.keys() >= set(ARGUMENTS):
        return None

    def attention(
        query_BTHD: jax.Array,
        key_BTKD: jax.Array,
        value_BTKD: jax.Array,
        documents: Documents,
        scale: float,
        window: int | None,
    ) -> jax.Array:
        out: jax.Array = function(
            query_BTHD,
            key_BTKD,
            value_BTKD,
            q_seqlen=documents.lengths_BM,
            kv_seqlen=documents.lengths_BM,
            q_offsets=documents.starts_BN,
            kv_offsets=documents.starts_BN,
            scale=scale,
            mask_type=mask_type,
            sliding_window_length=window,
        )
        return out

    return attention
