"""How much attention kernels multiply. No jax.

A kernel is one closed instruction in a program's text. Its operands tell the shapes; splash attention's own table of
blocks tells which of them it skips, cuDNN's configuration says whether its mask is causal.
"""

from __future__ import annotations

import math
import re
from statistics import mean

from trillora.preflight.hlo.parse import Computation, HloProgram, Instruction, Shape, integers
from trillora.preflight.hlo.work import CUDNN_ATTENTION, target

PALLAS_TARGET = "tpu_custom_call"
CUDNN_BLOCK = 128  # tokens; of a mask's edge whole blocks are computed
# Times the queries' bytes that small kernels around cuDNN's backward one move: products of the results with their
# gradients, sums in float32, the gradients of shared keys from each head. Seen on an H200: 10.0 to 11.1.
CUDNN_BACKWARD_PASSES = 10.5
_FLOATS = ("bf16", "f16", "f32")


def is_kernel(instruction: Instruction) -> bool:
    if instruction.opcode != "custom-call":
        return False
    name = target(instruction)
    return name == PALLAS_TARGET or CUDNN_ATTENTION.match(name) is not None


def kernel_flops(program: HloProgram, computation: Computation, kernel: Instruction) -> float | None:
    """None where neither the kernel nor its name tell."""
    if CUDNN_ATTENTION.match(target(kernel)):
        return _cudnn_flops(computation, kernel)
    told = re.search(r"\"cost_estimate\":\{[^}]*\"flops\":\s*\"?(\d+)", kernel.attributes)
    if told and int(told[1]):
        return float(told[1])
    return _splash_flops(program, computation, kernel) if "splash" in kernel.name else None


def head_width(computation: Computation, kernel: Instruction) -> int | None:
    """Of an attention kernel: how much of a matrix unit its products fill."""
    arrays = _attention_operands(computation, kernel)
    return arrays[0].dims[-1] if arrays else None


def _attention_operands(computation: Computation, kernel: Instruction) -> list[Shape]:
    """Queries, keys, values and what follows; rows may be a leading dim."""
    operands = [computation.by_name[name] for name in kernel.operands if name in computation.by_name]
    shapes = [operand.shapes[0] for operand in operands if operand.shapes]
    return [shape for shape in shapes if shape.dtype in _FLOATS and len(shape.dims) >= 3]


def _splash_flops(program: HloProgram, computation: Computation, kernel: Instruction) -> float | None:
    arrays = _attention_operands(computation, kernel)
    if len(arrays) < 3:
        return None
    query, key, value = arrays[:3]
    key_width, value_width = key.dims[-1], value.dims[-1]
    if "_fwd" in kernel.name:  # scores, then their product with the values
        widths = key_width + value_width
        share = _seen_share(computation, kernel)
    else:
        share = _forward_share(program, query)
        if "_dq" in kernel.name:  # scores again, their gradient, that of the queries
            widths = 2 * key_width + value_width
        else:  # the gradients of keys and values, and in the fused kernel that of the queries
            is_fused = any(len(shape.dims) == len(query.dims) + 1 for shape in kernel.shapes)
            widths = (3 if is_fused else 2) * key_width + 2 * value_width
    num_scores = math.prod(query.dims[:-1]) * key.dims[-2]
    return 2.0 * num_scores * widths * share


def _seen_share(computation: Computation, kernel: Instruction) -> float:
    """Blocks of scores a forward kernel computes, of all. It loops over a table [heads, blocks of queries, blocks of
    keys at most]: as wide as the sequence for a causal mask, narrower for a window."""
    tables = [computation.by_name[name] for name in kernel.operands if name in computation.by_name]
    table = next((t.shapes[0] for t in tables if t.shapes and t.shapes[0].dtype in ("s8", "s16", "s32")), None)
    if table is None or len(table.dims) != 3:
        return 1.0
    num_rows, width = table.dims[1:]
    return sum(min(row + 1, width) for row in range(num_rows)) / num_rows**2


def _forward_share(program: HloProgram, query: Shape) -> float:
    """The backward kernel's table is not narrowed by a window, the forward kernel's is; every backward kernel has a
    forward one, so on average they compute the same blocks."""
    shares = [
        _seen_share(computation, kernel)
        for computation in program.computations.values()
        for kernel in computation.instructions
        if is_kernel(kernel) and "_fwd" in kernel.name and _same_query(computation, kernel, query)
    ]
    return mean(shares) if shares else 0.5


def _same_query(computation: Computation, kernel: Instruction, query: Shape) -> bool:
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
        seen = min(window, dims[-1]) / dims[-1] if window else 1.0
        share = min(1.0, seen - seen**2 / 2 + CUDNN_BLOCK / 2 / dims[-1])  # of a causal band and its edge
    return 2.0 * math.prod(dims) * width * products * share


def beside_bytes(computation: Computation, kernel: Instruction) -> float:
    """Of memory, moved before and after a kernel by others that belong to it."""
    if not CUDNN_ATTENTION.match(target(kernel)) or "Backward" not in target(kernel):
        return 0.0
    arrays = _attention_operands(computation, kernel)
    return CUDNN_BACKWARD_PASSES * arrays[0].num_bytes if arrays else 0.0
