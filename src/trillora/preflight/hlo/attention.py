"""Cycles of the TPU's attention kernel, as the compiler's final instruction bundles have them. No jax.

The kernel goes through a grid of blocks of queries and keys. At each place it takes some cycles for itself, begins and
ends each row of the grid, and computes the block if the mask shows a part of it. Example: one head of width 128, 2048
tokens in blocks of 1024, causal mask, forward, on v5e: 4 places, 2 rows, 3 blocks:

    AttentionWork("fwd", 128, 1024, computed=3, rows=2, places=4).cycles(128)    # 3 * 4966 + 2 * 1404 + 4 * 50 = 17,907

The bundles were counted in programs of libtpu 0.0.42.1 for v5e and v6e; other chips have the same units, more or fewer.
They do not include waits for memory, which the simulation adds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

# Forward; all gradients in one kernel; the gradients of keys and values, and the gradient of queries, in two kernels.
Phase = Literal["fwd", "fused", "dkv", "dq"]

LARGEST_BLOCK = 1024
LANES = 128  # heads are padded to whole lanes


@dataclass(frozen=True)
class _Cycles:
    """Of one phase. `shorter`: how much slower a block of half the length is, for each of its scores, relative."""

    narrow: float  # for 1024 scores, heads of up to 128
    wide: float  # heads of 256
    shorter: float
    per_token: float  # to begin and end a row of the grid
    place: float


CYCLES: dict[int, dict[Phase, _Cycles]] = {
    128: {
        "fwd": _Cycles(4.82, 8.86, -0.04, 1.42, 50),
        "fused": _Cycles(9.09, 17.83, -0.005, 0.86, 102),
        "dkv": _Cycles(7.12, 13.9, 0.0, 0.74, 85),
        "dq": _Cycles(5.60, 10.9, 0.0, 0.39, 65),
    },
    256: {
        "fwd": _Cycles(3.19, 3.25, 0.11, 0.73, 61),
        "fused": _Cycles(5.61, 5.75, 0.054, 0.46, 110),
        "dkv": _Cycles(4.42, 4.53, 0.054, 0.41, 99),
        "dq": _Cycles(3.54, 3.62, 0.054, 0.22, 84),
    },
}
# Flops in one cycle of the chip on which the bundles were counted, by the side of its matrix unit.
COUNTED_FLOPS = {128: 197e12 / 1.5e9, 256: 918e12 / 1.75e9}


@dataclass(frozen=True)
class AttentionWork:
    """What a kernel does for all its sequences and heads."""

    phase: Phase
    width: float  # of keys and values, the mean
    block: int  # tokens
    computed: float  # blocks of scores
    rows: float  # of the grid: blocks of queries, or of keys for their gradients
    places: float  # of the grid

    def scaled(self, times: float) -> AttentionWork:
        return replace(self, computed=times * self.computed, rows=times * self.rows, places=times * self.places)

    def cycles(self, matrix_unit: int) -> float:
        """On one core of v5e or v6e, by the side of the matrix unit."""
        counted = CYCLES[256 if matrix_unit > 128 else 128][self.phase]
        whole = -(-self.width // LANES)  # pairs of lanes: 1 is narrow, 2 is wide
        per_score = (counted.narrow + (whole - 1) * (counted.wide - counted.narrow)) / 1024
        per_score *= 1 + counted.shorter * (LARGEST_BLOCK / self.block - 1)
        scores = self.computed * self.block**2
        return scores * per_score + self.rows * self.block * counted.per_token + self.places * counted.place

    def seconds(self, matrix_unit: int, flops_per_second: float) -> float:
        """On a chip with this peak. Chips with the same matrix unit differ in the number of units and in the clock."""
        return self.cycles(matrix_unit) * COUNTED_FLOPS[256 if matrix_unit > 128 else 128] / flops_per_second
