"""Where the documents of packed sequences are, in the form that cuDNN's ragged attention takes.

Example: a sequence with documents of 3 and 2 tokens and one token of padding, in a program for at most 4 documents:

    >>> found = find_documents(jnp.array([[1, 1, 1, 2, 2, 0]]), block=6, most=4)
    >>> found.lengths_BM, found.starts_BN
    [[3 2 1 -1]], [[0 3 5 -1 -1]]    # -1: no document

Padding counts as a document, so that every output is written: cuDNN leaves the others as they are in memory.

**Blocks.** The kernel's memory and part of its time grow with the documents that it has room for, times the longest one
that it allows. So sequences are cut into blocks of equal length, as short as possible, but no shorter than the longest
document. A document belongs to the block in which it begins, also if it ends in the next one: cuDNN only gets the place
of its first token. In two blocks, the same sequence is

    >>> find_documents(jnp.array([[1, 1, 1, 2, 2, 0]]), block=3, most=2)
    [[3 -1] [2 1]], [[0 -1 -1] [0 2 -1]]

The function that takes these arrays is private in jax, so `ragged_function` looks at its signature first. jax's public
function only takes a mask, which costs memory and time for everything that it hides.

| jax | |
|---|---|
| 0.11.2 | outputs and gradients compared with the reference on an H200 (`tests/support/ragged_on_gpu.py`) |
| 0.11.1 | the same function |
| 0.7.2 to 0.11.0 | wrong places of the keys if several query heads share a key head: these models use the mask |

Legend: B sequences (in `Documents`, blocks), T tokens, L blocks in a sequence, M documents that begin in a block,
N = M + 1, H query heads, K key/value heads, D width.
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
# A mask is used if more documents begin in a block than this share of the sequence's tokens. An estimate: up to 16 in
# 2,048 tokens were measured, and each more costs memory and a little time.
MOST_OF_TOKENS = 1 / 32


class BlockDocuments(NamedTuple):
    """The documents that begin in each block, in order. Unused places are -1."""

    lengths_BM: jax.Array
    starts_BN: jax.Array  # from the start of the block; always unused in the last place

    @property
    def most(self) -> int:
        """How many documents can begin in a block."""
        return self.lengths_BM.shape[1]

    def block_of(self, shape: tuple[int, ...]) -> int:
        """Tokens of a block, of sequences [B, T]."""
        return shape[0] * shape[1] // self.lengths_BM.shape[0]


# query [B, T, H, D], key and value [B, T, K, D], documents, scale, window -> [B, T, H, D]
RaggedAttention = Callable[[jax.Array, jax.Array, jax.Array, BlockDocuments, float, int | None], jax.Array]


def documents_bucket(most: int) -> int:
    """The number of documents to compile for, so that similar data share a program: 2, 3, 4, 6, 8, 12, 16 and so on."""
    most = max(most, 2)
    power = 1 << (most - 1).bit_length()
    return power * 3 // 4 if most <= power * 3 // 4 else power


def find_documents(segments_BT: jax.Array, block: int, most: int) -> BlockDocuments:
    """Where the segments of each sequence are. A segment is a run of equal ids. Padding, which has the id 0, also ends
    at the end of a block. No other segment may be longer than `block`, and at most `most` may begin in a block."""
    num_sequences, num_tokens = segments_BT.shape
    place_T = jnp.arange(num_tokens, dtype=jnp.int32)
    is_new_BT = jnp.pad(segments_BT[:, 1:] != segments_BT[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    is_start_BT = is_new_BT | ((segments_BT == 0) & (place_T % block == 0))
    end_BT = jax.lax.cummin(jnp.where(is_start_BT, place_T, num_tokens), axis=1, reverse=True)
    end_BT = jnp.pad(end_BT[:, 1:], ((0, 0), (0, 1)), constant_values=num_tokens)  # the next start after each token

    blocks = (num_sequences * num_tokens // block, block)
    is_start_LT = is_start_BT.reshape(blocks)
    number_LT = jnp.where(is_start_LT, jnp.cumsum(is_start_LT, axis=1, dtype=jnp.int32) - 1, -1)
    # cuDNN takes the ragged layout from two documents on.
    is_it_LTM = number_LT[:, :, None] == jnp.arange(max(most, 2))

    def of_documents(values_BT: jax.Array) -> jax.Array:
        found_LM = jnp.where(is_it_LTM, values_BT.reshape(blocks)[:, :, None], 0).sum(axis=1, dtype=jnp.int32)
        return jnp.where(is_it_LTM.any(axis=1), found_LM, -1)

    starts_LM = of_documents(jnp.broadcast_to(place_T % block, segments_BT.shape))
    starts_LN = jnp.pad(starts_LM, ((0, 0), (0, 1)), constant_values=-1)
    return BlockDocuments(of_documents(end_BT - place_T), starts_LN)


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
        documents: BlockDocuments,
        scale: float,
        window: int | None,
    ) -> jax.Array:
        block = documents.block_of(query_BTHD.shape)

        def in_blocks(array: jax.Array) -> jax.Array:
            return array.reshape(-1, block, *array.shape[2:])

        out: jax.Array = function(
            in_blocks(query_BTHD),
            in_blocks(key_BTKD),
            in_blocks(value_BTKD),
            q_seqlen=documents.lengths_BM,
            kv_seqlen=documents.lengths_BM,
            q_offsets=documents.starts_BN,
            kv_offsets=documents.starts_BN,
            scale=scale,
            mask_type=mask_type,
            sliding_window_length=None if window is None or window >= block else window,
        )
        return out.reshape(query_BTHD.shape)

    return attention
