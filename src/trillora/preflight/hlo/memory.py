"""The compiler's memory report, in terms of the model. No jax.

The TPU compiler lists every buffer it allocates, with its shapes. The shape identifies the buffer. For a model with 32
layers, width 4096 and a vocabulary of 32,000 that trains one sequence of 2048 tokens per device:

    bf16[32,1,2048,4096]   leading dim 32      -> kept from all 32 layers for the backward pass
    bf16[512,32000]        has the vocabulary  -> logits of one chunk of the loss
    bf16[1,14336,4096]     shape of a weight   -> weight mlp.up_proj, all-gathered
    bf16[2048,14336]       has the tokens      -> activations of one layer (width 14,336)
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trillora.devices.chips import GIB
from trillora.preflight.result import LargeBuffer

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": GIB, "TiB": 2**40}
NUM_LARGEST = 5
_TOTAL = re.compile(r"Memory Space: default.*?Total bytes: (\d+)", re.DOTALL)
_ROW = re.compile(r"^\s*[\d.]+(?:[KMGT]i)?B\(\s*\d+%\);\s*([\d.]+)((?:[KMGT]i)?B);\s*\d+;\s*\d+; (.*)$")
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Buffer:
    """A range of memory and the shapes of the arrays that use it in turn."""

    num_bytes: float
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MemoryReport:
    total_bytes: int  # HBM of one device: arguments, results and temporaries
    temporaries: tuple[Buffer, ...]  # largest first


@dataclass(frozen=True)
class StepShapes:
    """Sizes of a step on one device, to recognize buffers by their shape."""

    num_layers: int
    num_rows: int  # sequences of a micro-batch
    num_tokens: int  # of a sequence
    width: int
    vocabulary: int
    weights: Mapping[tuple[int, ...], str]  # unsharded shape of a layer's weight -> its name
    copied: str = "all-gathered"  # why there is another copy of a weight


def read_report(text: str) -> MemoryReport | None:
    """None if the text has another format."""
    total = _TOTAL.search(text)
    if total is None:
        return None
    buffers: list[Buffer] = []
    for line in text.splitlines():
        row = _ROW.match(line)
        if row:
            shapes = tuple(tuple(int(d) for d in dims.split(",") if d) for _, dims in _SHAPE.findall(row[3]))
            buffers.append(Buffer(float(row[1]) * UNITS[row[2]], shapes))
        elif buffers and not line.strip():
            break  # tables of arguments follow
    return MemoryReport(int(total[1]), tuple(buffers))


def largest(report: MemoryReport, step: StepShapes) -> tuple[LargeBuffer, ...]:
    """Descriptions and sizes of the largest buffers. Buffers with the same description are added up."""
    found: dict[str, float] = {}
    for buffer in report.temporaries:
        what = describe(buffer, step)
        found[what] = found.get(what, 0.0) + buffer.num_bytes
    rows = sorted(found.items(), key=lambda item: -item[1])[:NUM_LARGEST]
    return tuple(LargeBuffer(what, round(num_bytes / GIB, 3)) for what, num_bytes in rows)


def logits_bytes(report: MemoryReport, step: StepShapes) -> float:
    """Size of the largest buffer of logits."""
    return max((b.num_bytes for b in report.temporaries if "logits" in describe(b, step)), default=0.0)


def describe(buffer: Buffer, step: StepShapes) -> str:
    """What a buffer holds, judged by its largest shape."""
    dims = max(buffer.shapes, key=math.prod, default=())
    bare = tuple(d for d in dims if d > 1)
    if bare in step.weights:
        return f"{step.weights[bare]}, {step.copied}"
    if step.vocabulary in dims:
        return "logits of one chunk of the loss"
    if len(bare) > 1 and bare[0] == step.num_layers:
        inner = math.prod(bare[1:])
        if inner % step.num_tokens == 0 and inner >= step.num_tokens * step.width // 8:
            return f"kept from all {step.num_layers} layers for the backward pass"
        return f"adapter and its gradient, all {step.num_layers} layers"
    if step.num_tokens in dims or math.prod(bare) % (step.num_rows * step.num_tokens) == 0:
        width = bare[-1] if bare else 1
        kind = "attention" if dims.count(step.num_tokens) > 1 else f"width {width:,}"
        return f"activations of one layer ({kind})"
    return "parts of weights and gradients"


def out_of_memory(report: MemoryReport | None, step: StepShapes, limit_gib: float, what: str) -> str:
    """Why the step does not fit, in one sentence."""
    if report is None:
        return f"{what}: the compiler ran out of memory; each device has {limit_gib:.2f} GiB."
    used = report.total_bytes / GIB
    parts = "; ".join(f"{buffer.gib:.2f} GiB {buffer.what}" for buffer in largest(report, step)[:3])
    return f"{what}: needs {used:.2f} GiB per device, the limit is {limit_gib:.2f} GiB. Largest buffers: {parts}."
