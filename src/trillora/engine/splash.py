"""jax's attention kernel for TPUs, for long sequences too: its blocks, their tables, and which gradient kernel it uses.

The kernel works on blocks of queries and keys, and skips the blocks that the mask hides. jax finds these by comparing
all pairs of tokens: minutes for 131,072 tokens. Here they follow from the distance of two blocks. Example: four blocks
of 128 tokens and a window of 200 tokens; 0 is hidden, 1 visible in part, 2 visible completely:

    >>> block_kinds(4, 128, None)      >>> block_kinds(4, 128, 200)
    [[1 0 0 0]                         [[1 0 0 0]
     [2 1 0 0]                          [1 1 0 0]
     [2 2 1 0]                          [1 1 1 0]
     [2 2 2 1]]                         [0 1 1 1]]

For the gradient jax has two ways. The fused kernel computes the scores once, but writes one partial gradient of the
queries for each block of keys: memory and traffic grow with the square of the sequence. The other way takes two
kernels, which compute the scores twice and write each gradient once. `is_fused` chooses.

Shorter blocks hide more of what a window hides: with 8192 tokens and a window of 512, blocks of 1024 compute 15.7
million scores, blocks of 512 half as many. `block_size` chooses.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info

BLOCKS = (128, 256, 512, 1024)
SHORTEST_GOOD = 512  # shorter blocks take 1.4 to 2.8 times as long for each score
CLEARLY = 0.9  # chips differ: below this ratio, the shorter block is the cheaper one on all
# Partial gradients of the queries, each as large as the queries: 16 are 1 GiB for 16,384 tokens and 16 heads of 128.
MOST_PARTIAL = 16
# Costs, in the time that the forward and the fused gradient kernel take for one score in a block of 1024. All are
# between v5e's and v6e's, for heads of 128.
HALF_BLOCK = 1.05  # a score in a block of 512
TWO_KERNELS = 0.26  # more for a score if its gradient takes two kernels
PARTIAL_TOKEN = 80  # to write and add the partial gradient of one token; with a window, most of these are zero
PLACE = 15_000  # a place of the grid, computed or not
HIDDEN, PARTLY, VISIBLE = 0, 1, 2


def block_size(num_tokens: int, largest: int, window: int | None) -> int:
    """The largest block that divides the sequence, or half of it if that is clearly cheaper."""
    long = max(block for block in BLOCKS if num_tokens % block == 0 and block <= largest)
    if long // 2 < SHORTEST_GOOD or cost(num_tokens, long // 2, window) > CLEARLY * cost(num_tokens, long, window):
        return long
    return long // 2


def cost(num_tokens: int, block: int, window: int | None) -> float:
    """Of the kernels for one head, in scores."""
    num_blocks = num_tokens // block
    kinds = block_kinds(num_blocks, block, window)
    scores = int(np.count_nonzero(kinds)) * block**2 * (1.0 if block == BLOCKS[-1] else HALF_BLOCK)
    if is_fused(kinds, block):
        return scores + PARTIAL_TOKEN * num_tokens * num_blocks + PLACE * num_blocks**2
    return (1 + TWO_KERNELS) * scores + PLACE * num_blocks * int(np.count_nonzero(kinds, axis=1).max())


def block_kinds(num_blocks: int, block: int, window: int | None) -> np.ndarray:
    """What the mask shows of each block [query blocks, key blocks]."""
    index = np.arange(num_blocks)
    nearest = (index[:, None] - index[None, :]) * block - (block - 1)  # key to query, in tokens, over a block's pairs
    farthest = nearest + 2 * (block - 1)
    reach = num_blocks * block if window is None else window  # a query sees keys at distances from 0 to reach - 1
    some = (farthest >= 0) & (nearest < reach)
    whole = (nearest >= 0) & (farthest < reach)
    return np.where(whole, VISIBLE, np.where(some, PARTLY, HIDDEN)).astype(np.int32)


def is_fused(kinds: np.ndarray, block: int) -> bool:
    """Whether the fused gradient kernel is the better one: its memory is bounded, and its partial gradients cost less
    than computing the scores again."""
    num_blocks, scores = len(kinds), int(np.count_nonzero(kinds)) * block**2
    is_cheaper = PARTIAL_TOKEN * num_blocks**2 * block <= TWO_KERNELS * scores
    return num_blocks == 1 or (num_blocks <= MOST_PARTIAL and is_cheaper)


def tables(kinds: np.ndarray, *, by_key: bool, shrink: bool) -> tuple[np.ndarray, np.ndarray]:
    """`data_next` and `block_mask` as the kernel takes them: which block to fetch at each place of its grid, and the
    kind of each block. The kernel for keys goes through the query blocks of each key block (`by_key`). With `shrink`,
    hidden blocks are left out of the grid as far as all its rows allow: the visible ones come first, or last if
    `by_key`."""
    grid = kinds.T if by_key else kinds
    visible = np.flatnonzero(grid)
    after = np.searchsorted(visible, np.arange(grid.size)) % visible.size  # the next visible place, or the first again
    fetched = (visible[after] % grid.shape[1]).reshape(grid.shape)
    if shrink:
        width = int(np.count_nonzero(grid, axis=1).max())
        order = np.argsort((grid != HIDDEN) if by_key else (grid == HIDDEN), axis=1, kind="stable")
        order = order[:, -width:] if by_key else order[:, :width]
        grid, fetched = (np.take_along_axis(table, order, axis=1) for table in (grid, fetched))
        fetched = np.where(grid == HIDDEN, 0, fetched)
    if by_key:
        grid, fetched = grid.T, fetched.T
    return _small(fetched)[None], _small(grid)[None]


def _small(table: np.ndarray) -> np.ndarray:
    """Tables are in the scalar memory of the chip, which is small."""
    return np.ascontiguousarray(table, dtype=np.min_scalar_type(-int(table.max()) - 1))


@functools.cache
def splash_kernel(
    num_heads: int,
    num_tokens: int,
    window: int | None,
    softcap: float | None,
    largest_block: int,
    saved_name: str,
    interpret: bool,
) -> Any:
    """A function of queries, keys and values of one sequence. `saved_name`: of what the backward pass needs."""
    window = None if window is None or window >= num_tokens else window
    block = block_size(num_tokens, largest_block, window)
    kinds = block_kinds(num_tokens // block, block, window)
    fused = is_fused(kinds, block)
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )
    shape = (block, block)  # of one block: the tables of the whole mask replace its own
    mask: Any = splash_mask.CausalMask(shape) if window is None else splash_mask.LocalMask(shape, (window - 1, 0), 0)
    with jax.ensure_compile_time_eval():  # the tables must be constants, not tracers
        kernel = splash.make_splash_mha(
            splash_mask.MultiHeadMask([mask] * num_heads),
            block_sizes=sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=softcap,
            residual_checkpoint_name=saved_name,  # saved: the backward pass does not run the forward kernel again
            interpret=interpret,
        )
        # An array that jax computes would belong to the mesh of this call, and the kernel is kept for other meshes.
        positions: Any = jnp.array(np.arange(num_tokens, dtype=np.int32))

        def info(*, by_key: bool, shrink: bool) -> mask_info.MaskInfo:
            fetched, shown = map(jnp.array, tables(kinds, by_key=by_key, shrink=shrink))
            return mask_info.MaskInfo(fetched, None, shown, None, q_sequence=positions)

        rows = info(by_key=False, shrink=True)
        columns = info(by_key=True, shrink=not fused)
        return type(kernel)(rows, None if fused else rows, columns, **kernel.kwargs)
