"""What the compiler's memory report says, in words of the model. No jax.

The TPU compiler writes down every buffer it lays out, by shape. A shape tells what it is: one that has the vocabulary
in it holds logits, one with a dim for all layers was saved for the backward pass, one shaped like a weight is that
weight made whole again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

GIB = 2**30
UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
NUM_LARGEST = 5
_TOTAL = re.compile(r"Memory Space: default.*?Total bytes: (\d+)", re.DOTALL)
_ROW = re.compile(r"^\s*[\d.]+(?:[KMGT]i)?B\(\s*\d+%\);\s*([\d.]+)((?:[KMGT]i)?B);\s*\d+;\s*\d+; (.*)$")
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")


@dataclass(frozen=True)
class Buffer:
    """A stretch of memory and the shapes that lie in it, one after the other."""

    num_bytes: float
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MemoryReport:
    total_bytes: int  # of one device's HBM: arguments, results and everything in between
    temporaries: tuple[Buffer, ...]  # the largest first


@dataclass(frozen=True)
class StepShapes:
    """What the sizes of a step mean, on one device."""

    num_layers: int
    num_rows: int  # of a micro-batch
    num_tokens: int  # of a row
    width: int
    vocabulary: int
    weights: Mapping[tuple[int, ...], str]  # whole shape of a layer's weight -> its name


def read_report(text: str) -> MemoryReport | None:
    """None where the compiler's format is another."""
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
            break  # what follows are arguments, one table each
    return MemoryReport(int(total[1]), tuple(buffers))


def largest(report: MemoryReport, step: StepShapes) -> list[dict[str, object]]:
    """The largest buffers in words, for people. Several of the same kind are counted together."""
    found: dict[str, float] = {}
    for buffer in report.temporaries:
        what = describe(buffer, step)
        found[what] = found.get(what, 0.0) + buffer.num_bytes
    rows = sorted(found.items(), key=lambda item: -item[1])[:NUM_LARGEST]
    return [{"what": what, "gib": round(num_bytes / GIB, 3)} for what, num_bytes in rows]


def logits_bytes(report: MemoryReport, step: StepShapes) -> float:
    """Of the largest piece of logits that is held."""
    return max((b.num_bytes for b in report.temporaries if "logits" in describe(b, step)), default=0.0)


def describe(buffer: Buffer, step: StepShapes) -> str:
    """A buffer by the largest shape that lies in it."""
    dims = max(buffer.shapes, key=math.prod, default=())
    bare = tuple(d for d in dims if d > 1)
    if bare in step.weights:
        return f"{step.weights[bare]}, gathered whole to be used"
    if step.vocabulary in dims:
        return "logits of a piece of the loss"
    if len(bare) > 1 and bare[0] == step.num_layers:
        inner = math.prod(bare[1:])
        if inner % step.num_tokens == 0 and inner >= step.num_tokens * step.width // 8:
            return f"kept from all {step.num_layers} layers for the backward pass"
        return f"adapter and its gradient, all {step.num_layers} layers"
    if step.num_tokens in dims or math.prod(bare) % (step.num_rows * step.num_tokens) == 0:
        width = bare[-1] if bare else 1
        kind = "attention" if dims.count(step.num_tokens) > 1 else f"width {width:,}"
        return f"one layer at work ({kind})"
    return "pieces of weights and gradients"


def out_of_memory(report: MemoryReport | None, step: StepShapes, limit_gib: float, what: str) -> str:
    """Why the step does not fit, in a sentence."""
    if report is None:
        return f"{what}: the compiler ran out of memory; a device has {limit_gib:.2f} GiB."
    used = report.total_bytes / GIB
    parts = ", ".join(f"{row['gib']:.2f} GiB {row['what']}" for row in largest(report, step)[:3])
    return f"{what}: {used:.2f} GiB of {limit_gib:.2f} GiB a device. Largest: {parts}."
