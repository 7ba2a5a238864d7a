"""Counts the work of kernels: attention, and the TPU's grouped products. No jax.

In the text of a program a kernel is a single opaque instruction. Its operands give the shapes. The block table of
splash attention shows which blocks it skips; the configuration of a cuDNN kernel shows whether its mask is causal. A
grouped product states its tiles.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import mean

from trillora.preflight.hlo.attention import LARGEST_BLOCK, AttentionWork, Phase
from trillora.preflight.hlo.parse import ArrayShape, Computation, HloProgram, Instruction, integers
from trillora.preflight.hlo.work import CUDNN_ATTENTION, target

PALLAS_TARGET = "tpu_custom_call"
CUDNN_BLOCK = 128  # tokens; blocks on the edge of the mask are computed whole
# Traffic of the small kernels around cuDNN's backward kernel, in multiples of the bytes of the queries: products of the
# results with their gradients, sums in float32, per-head gradients of shared keys. Measured on an H200: 10.0 to 11.1.
CUDNN_BACKWARD_PASSES = 10.5
GROUP_TABLES = "ragged-dot-metadata"  # the kernel that lists the tiles of a grouped product
_XLA_TILES = re.compile(r"ragged_dot_tiling=\"(\d+),(\d+),(\d+)\"")
_OUR_TILES = re.compile(r"grouped_product_tiles_(\d+)_(\d+)_(\d+)_(\d+)_end")
_FLOATS = ("bf16", "f16", "f32")


def is_kernel(instruction: Instruction) -> bool:
    if instruction.opcode != "custom-call":
        return False
    name = target(instruction)
    return name == PALLAS_TARGET or CUDNN_ATTENTION.match(name) is not None


def kernel_flops(program: HloProgram, computation: Computation, kernel: Instruction) -> float | None:
    """None if neither the kernel nor its name gives them."""
    if CUDNN_ATTENTION.match(target(kernel)):
        return _cudnn_flops(computation, kernel)
    if kernel.name.startswith(GROUP_TABLES):
        return 0.0
    stated = re.search(r"\"cost_estimate\":\{[^}]*\"flops\":\s*\"?(\d+)", kernel.attributes)
    if stated and int(stated[1]):
        return float(stated[1])
    return _splash_flops(program, computation, kernel) if "splash" in kernel.name else None


def head_width(computation: Computation, kernel: Instruction) -> int | None:
    """Head width of an attention kernel, which limits how much of the matrix unit its products fill."""
    arrays = _attention_operands(computation, kernel)
    return arrays[0].dims[-1] if arrays else None


def _attention_operands(computation: Computation, kernel: Instruction) -> list[ArrayShape]:
    """Queries, keys, values and the operands after them, which may have a leading batch dim."""
    operands = [computation.by_name[name] for name in kernel.operands if name in computation.by_name]
    shapes = [operand.shapes[0] for operand in operands if operand.shapes]
    return [shape for shape in shapes if shape.dtype in _FLOATS and len(shape.dims) >= 3]


def attention_work(program: HloProgram, computation: Computation, kernel: Instruction) -> AttentionWork | None:
    """What a TPU's attention kernel does; None for other kernels."""
    arrays = _attention_operands(computation, kernel)
    if "splash" not in kernel.name or len(arrays) < 3:
        return None
    query, key, value = arrays[:3]
    phase = _phase(kernel, query)
    table = _block_table(computation, kernel)
    num_tokens, num_heads = query.dims[-2], math.prod(query.dims[:-2])
    # A window makes the last dim of the table narrower, or, if a gradient of the keys is not fused, the one before.
    num_blocks = table.dims[2 if phase == "dkv" else 1] if table else max(1, num_tokens // LARGEST_BLOCK)
    share = _forward_share(program, kernel, query) if phase == "fused" else _computed_share(computation, kernel, phase)
    return AttentionWork(
        phase=phase,
        width=(key.dims[-1] + value.dims[-1]) / 2,
        block=num_tokens // num_blocks,
        computed=num_heads * num_blocks**2 * share,
        rows=num_heads * num_blocks,
        places=num_heads * (math.prod(table.dims[1:]) if table else num_blocks**2),
    )


def _phase(kernel: Instruction, query: ArrayShape) -> Phase:
    if "_fwd" in kernel.name:
        return "fwd"
    if "_dq" in kernel.name:
        return "dq"
    # The fused kernel also returns the partial gradients of the queries.
    return "fused" if any(len(shape.dims) == len(query.dims) + 1 for shape in kernel.shapes) else "dkv"


def _splash_flops(program: HloProgram, computation: Computation, kernel: Instruction) -> float | None:
    work = attention_work(program, computation, kernel)
    if work is None:
        return None
    key_width, value_width = (array.dims[-1] for array in _attention_operands(computation, kernel)[1:3])
    widths = {
        "fwd": key_width + value_width,  # scores, and their product with the values
        "dq": 2 * key_width + value_width,  # scores again, their gradient, and the gradient of the queries
        "dkv": 2 * key_width + 2 * value_width,
        "fused": 3 * key_width + 2 * value_width,
    }
    return 2.0 * work.computed * work.block**2 * widths[work.phase]


def _computed_share(computation: Computation, kernel: Instruction, phase: Phase = "fwd") -> float:
    """Fraction of the blocks of scores that a kernel computes. It loops over a table [heads, query blocks, max key
    blocks]: as wide as the sequence for a causal mask, narrower for a sliding window. For the gradients of the keys it
    is [heads, max query blocks, key blocks]."""
    table = _block_table(computation, kernel)
    if table is None:
        return 1.0
    num_rows, width = reversed(table.dims[1:]) if phase == "dkv" else table.dims[1:]
    return sum(min(row + 1, width) for row in range(num_rows)) / num_rows**2


def _block_table(computation: Computation, kernel: Instruction) -> ArrayShape | None:
    tables = [computation.by_name[name] for name in kernel.operands if name in computation.by_name]
    table = next((t.shapes[0] for t in tables if t.shapes and t.shapes[0].dtype in ("s8", "s16", "s32")), None)
    return table if table is not None and len(table.dims) == 3 else None


def _forward_share(program: HloProgram, fused: Instruction, query: ArrayShape) -> float:
    """The table of the fused kernel has the whole mask, with or without a window, so the share of its forward kernel is
    used: of those in the same branch, if layers of several kinds select their attention, else the average."""
    kernels = [
        (computation, kernel)
        for computation in program.computations.values()
        for kernel in computation.instructions
        if is_kernel(kernel) and "_fwd" in kernel.name and _same_query(computation, kernel, query)
    ]
    in_branch = [(computation, kernel) for computation, kernel in kernels if _branch(kernel) == _branch(fused)]
    shares = [_computed_share(computation, kernel) for computation, kernel in in_branch or kernels]
    return mean(shares) if shares else 0.5


def _branch(kernel: Instruction) -> str | None:
    found = re.search(r"/(branch_\d+_fun)/", kernel.attributes)
    return found and found[1]


def _same_query(computation: Computation, kernel: Instruction, query: ArrayShape) -> bool:
    arrays = _attention_operands(computation, kernel)
    return bool(arrays) and arrays[0].dims == query.dims


def _cudnn_flops(computation: Computation, kernel: Instruction) -> float | None:
    scores = re.search(r"\"intermediate_tensor_shape\":\s*\{.*?\"dimensions\":\s*\[([^\]]*)\]", kernel.attributes)
    width = head_width(computation, kernel)
    if scores is None or width is None:
        return None
    dims = integers(scores[1])
    products = 5 if "Backward" in target(kernel) else 2
    share = 1.0
    if "CAUSAL" in (re.search(r"\"mask_type\":\s*\"(\w+)\"", kernel.attributes) or ["", ""])[1]:
        window = kernel.config_number("sliding_window_length") or 0
        width_share = min(window, dims[-1]) / dims[-1] if window else 1.0
        share = min(1.0, width_share - width_share**2 / 2 + CUDNN_BLOCK / 2 / dims[-1])  # causal band and its edge
    return 2.0 * math.prod(dims) * width * products * share


@dataclass(frozen=True)
class GroupedProduct:
    """How the TPU computes rows [M, K] times the matrix [K, N] of their group: tile by tile.

    20,480 rows of width 2048 in 16 groups, times [2048, 1536], with tiles of 128 rows, 2048 inputs and 640 outputs:
    160 tiles of rows, and one more at each of the 15 places where a group may end inside a tile; 3 tiles of outputs."""

    num_steps: int
    flops: float  # with whole tiles
    hbm_bytes: float  # rows are read for each tile of outputs, a matrix once for each of its tiles


def grouped_product(computation: Computation, kernel: Instruction) -> GroupedProduct | None:
    """Of XLA's kernel, or of the one that `engine.mixture.grouped_product` calls: its name says how many tiles have
    rows if the router is even, because it skips the others. None if the kernel is not a grouped product with one matrix
    for each group."""
    tiling = _XLA_TILES.search(kernel.attributes) or _OUR_TILES.search(kernel.attributes)
    operands = [computation.by_name[name].shapes for name in kernel.operands if name in computation.by_name]
    shapes = [found[0] for found in operands if found and found[0].dtype in _FLOATS]
    if tiling is None or len(shapes) != 2 or len(shapes[1].dims) != 3 or len(kernel.shapes[0].dims) != 2:
        return None
    rows_tile, inner_tile, outer_tile = map(int, tiling.groups()[:3])
    rows, weights, out = (*shapes, kernel.shapes[0])
    (num_rows, inner), (_, outer), num_groups = rows.dims, out.dims, weights.dims[0]
    full_tiles = int(tiling[4]) if tiling.re is _OUR_TILES else -(-num_rows // rows_tile)
    row_tiles = full_tiles + num_groups - 1
    inner_tiles, outer_tiles = -(-inner // inner_tile), -(-outer // outer_tile)
    num_steps = row_tiles * inner_tiles * outer_tiles
    of_rows = rows.num_bytes * row_tiles * rows_tile / num_rows * outer_tiles
    of_weights = weights.num_bytes * (1 if inner_tiles == 1 else row_tiles / num_groups)
    return GroupedProduct(
        num_steps=num_steps,
        flops=2.0 * num_steps * rows_tile * inner_tile * outer_tile,
        hbm_bytes=of_rows + of_weights + out.num_bytes * full_tiles * rows_tile / num_rows,
    )


def extra_bytes(computation: Computation, kernel: Instruction) -> float:
    """HBM traffic of the helper kernels that run before and after a kernel."""
    if not CUDNN_ATTENTION.match(target(kernel)) or "Backward" not in target(kernel):
        return 0.0
    arrays = _attention_operands(computation, kernel)
    return CUDNN_BACKWARD_PASSES * arrays[0].num_bytes if arrays else 0.0
