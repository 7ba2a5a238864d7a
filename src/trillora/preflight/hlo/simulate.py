"""Simulates how long a compiled step takes, from the text of its scheduled program. No jax.

Three units work in parallel: compute, HBM, and the links to other devices. Instructions run in order. A copy or
collective that was started earlier runs in parallel with them; only the wait for its end costs time. A loop body is
simulated once and its time multiplied. Example: two products and an all-gather on 8 v5e devices (197 TFLOP/s, 819 GB/s
of HBM, 2 x 45 GB/s of links; times in microseconds):

    ENTRY %main (x: bf16[2048,4096], w: bf16[4096,4096], v: bf16[512,4096]) -> bf16[2048,4096] {
      %x = bf16[2048,4096]{1,0} parameter(0)                                                          clock
      %w = bf16[4096,4096]{1,0} parameter(1)                                                            0
      %v = bf16[512,4096]{1,0} parameter(2)                                                             0
      %s = (bf16[512,4096]{1,0}, bf16[4096,4096]{1,0}) all-gather-start(%v), replica_groups={}          0
      %y = bf16[2048,4096]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}       379
      %d = bf16[4096,4096]{1,0} all-gather-done(%s)                                                   416
      ROOT %z = bf16[2048,4096]{1,0} dot(%y, %d), lhs_contracting_dims={1}, rhs_contracting_dims={0}  795
    }

    dot         2 * 2048 * 4096 * 4096 flops / (0.92 * 197e12)         = 379; its HBM traffic, 67 MB / (0.85 * 819e9)
                                                                         = 96, is hidden
    all-gather  7 * 4 MiB sent / (0.80 * 2 * 45e9) + 8 hops of 1 each  = 416, of which 416 - 379 = 37 are exposed

The factors 0.92, 0.85 and 0.80 are the `Efficiency` of this chip. A TPU program that was compiled to the end carries
the compiler's own cycle counts, which are used instead. A program from an early exit, and any GPU program, does not:
there a product takes its flops divided by the peak rate, and on a TPU fused elementwise operations use the vector unit,
with a fixed cost for each fusion without a product.
A `Slowdown`, measured on the chip, lowers the efficiency (`preflight.measured_speeds`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from trillora.devices.chips import Chip
from trillora.preflight.hlo.kernels import (
    GroupedProduct,
    attention_work,
    extra_bytes,
    grouped_product,
    head_width,
    is_kernel,
    kernel_flops,
)
from trillora.preflight.hlo.parse import HOST, Computation, HloProgram, Instruction, parse, trip_count
from trillora.preflight.hlo.work import TRITON, Transfer, Work, target

HOP_SECONDS = 1e-6  # latency of a collective per neighbor, for at most MAX_HOPS
MAX_HOPS = 16
GRID_STEP_SECONDS = 0.35e-6  # of a grouped product's kernel: one tile more costs this in addition to its arithmetic
NARROW_HEADS = 64  # widest
MASKED_ATTENTION = "ScaleBias"  # in the names of cuDNN's kernels
LARGE_GROUP = 64  # devices; groups of this size or more use all dims of a 3D torus at once

RARE = "rarely_runs"  # in the names of loops that usually end before they begin (`engine.mixture.experts`)

# These cost nothing: other names for existing values, and markers for the compiler.
_FREE = frozenset(
    {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "partition-id", "replica-id"}
    | {"add-dependency", "opt-barrier", "domain"}
)
_FREE_TARGETS = frozenset(
    {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "PrepareAsyncCallStart"}
    | {"PrepareAsyncCallDone", "SPMDFullToShardShape", "SPMDShardToFullShape"}
)


@dataclass(frozen=True)
class Efficiency:
    """The fraction of a chip's public figures that programs reach."""

    hbm: float
    links: float
    product: float  # of peak flops, for products without the compiler's cycle count
    kernel: float  # of peak flops, for kernels that are not counted in bundles
    narrow: float = 1.0  # of `kernel`, for attention with heads of at most NARROW_HEADS on a GPU
    masked: float = 1.0  # of `kernel`, for attention with a mask in memory on a GPU
    triton: float = 1.0  # of `hbm`, for kernels in Triton
    attention: float = 0.9  # of the clock, for the bundles of a TPU's attention kernel; the rest are waits
    launch_seconds: float = 0.0  # per instruction


@dataclass(frozen=True)
class Slowdown:
    """How many times slower each unit of a chip is than its efficiency says; 1 is as fast."""

    compute: float = 1.0  # products and kernels
    hbm: float = 1.0
    links: float = 1.0


AS_ASSUMED = Slowdown()

# `product` was fitted to the published rates of docs/preflight.md, with one value for chips with a matrix unit of 128
# and one for 256, and `attention` with one for all (tools/tpu_anchors.py prints the errors). `hbm` and `links` are what
# large copies and collectives are known to reach.
TPU = Efficiency(hbm=0.85, links=0.80, product=0.92, kernel=0.50)
TPU_LARGE_UNIT = Efficiency(hbm=0.85, links=0.80, product=0.83, kernel=0.56)
# Fitted to five steps with fused kernels on an H200 (benchmarks/preflight_gpu.py); `links` is assumed. `product` is as
# much as the card's power allows in steps that are mostly products: one by itself reaches 0.80. Half of the launch time
# is the start and end of the kernel, half the gap before it.
GPU = Efficiency(
    hbm=0.85, links=0.80, product=0.70, kernel=0.52, narrow=0.72, masked=0.73, triton=0.75, launch_seconds=4e-6
)
UNKNOWN_CYCLES = 2**62  # the compiler writes the largest 64-bit integer where it has no estimate


def efficiency_of(chip: Chip, slowdown: Slowdown = AS_ASSUMED) -> Efficiency:
    base = GPU if chip.torus_dims == 0 else TPU_LARGE_UNIT if chip.matrix_unit > 128 else TPU
    return replace(
        base,
        hbm=base.hbm / slowdown.hbm,
        links=base.links / slowdown.links,
        product=base.product / slowdown.compute,
        kernel=base.kernel / slowdown.compute,
        attention=base.attention / slowdown.compute,
    )


def has_cycle_counts(hlo_text: str) -> bool:
    """Whether the compiler has counted cycles. Programs of libtpu 0.0.50 that are not compiled to the end have the
    field too, in a few instructions and with the value for "unknown"."""
    counts = re.finditer(r"\"estimated_cycles\\?\":\s*\"?(\d+)", hlo_text)
    return any(int(found[1]) < UNKNOWN_CYCLES for found in counts)


def num_lanes(chip: Chip, num_devices: int) -> int:
    """Number of links a device sends on at once: both directions of each torus dim that a group of this size uses."""
    return 2 * (3 if num_devices >= LARGE_GROUP and chip.torus_dims == 3 else 1)


# Correction of the compiler's cycle counts for instructions without products. The compiler assumes that these are bound
# by HBM at 0.4 of its public bandwidth, even if the operands are in on-chip memory.
VECTOR_CYCLES = 0.25
# A TPU takes this long for a fusion without a product, however small. The compiler adds 1.21 us on v5e and on v6e
# (libtpu 0.0.42.1), also where everything is in on-chip memory, so it is corrected in the same way.
FUSION_SECONDS = VECTOR_CYCLES * 1.21e-6
# A TPU's vector unit has 8 x 128 lanes with four arithmetic units each; about half of them are busy.
VECTOR_OPERATIONS_PER_CYCLE = 8 * 128 * 2
# Rate of products of 8-bit numbers on a TPU, relative to bfloat16. The public one is 2. The compiler counts 396,000
# cycles instead of 525,000 for 2048 x 4096 x 14336 on v6e (libtpu 0.0.42.1); no measured rates are known to us.
TPU_8_BITS = 4 / 3


@dataclass(frozen=True)
class SimulatedStep:
    """One step on one device. The times of the units overlap and do not add up to `seconds`."""

    seconds: float
    roofline_seconds: float  # lower bound: the largest of compute, HBM and links at their public figures
    compute_seconds: float  # matrix and vector units, without kernels
    hbm_seconds: float
    interconnect_seconds: float
    exposed_interconnect_seconds: float  # time spent waiting for the links
    kernel_seconds: float  # Pallas and cuDNN kernels
    flops: float
    hbm_bytes: float
    interconnect_bytes: float
    warnings: tuple[str, ...]  # parts of the program that were not understood


def simulate(
    hlo_text: str,
    chip: Chip,
    num_devices: int,
    branch_shares: Sequence[float] = (),
    slowdown: Slowdown = AS_ASSUMED,
) -> SimulatedStep:
    """Simulates a step from the text of its program: `compiled.as_text()`, or the compiler's dump after optimization.

    `branch_shares`: how often each branch of a conditional with that many branches is taken, if known. Layers of
    several kinds that share a loop body select their mask with such a conditional. `slowdown`: as measured on the chip.
    """
    program = parse(hlo_text)
    on_gpu = chip.torus_dims == 0
    work = Work(program, num_devices, matrix_unit=chip.matrix_unit, on_gpu=on_gpu)
    walk = _Walk(program, work, chip, has_cycle_counts(hlo_text), branch_shares, slowdown)
    total = walk.run(program.entry)
    roofline = max(
        total.bf16_flops / (chip.bf16_tflops * 1e12),
        total.hbm_bytes / (chip.hbm_gb_per_second * 1e9),
        total.link_peak_seconds,
    )
    return SimulatedStep(
        seconds=total.seconds,
        roofline_seconds=roofline,
        compute_seconds=total.compute_seconds,
        hbm_seconds=total.hbm_seconds,
        interconnect_seconds=total.link_seconds,
        exposed_interconnect_seconds=total.exposed_link_seconds,
        kernel_seconds=total.kernel_seconds,
        flops=total.flops,
        hbm_bytes=total.hbm_bytes,
        interconnect_bytes=total.link_bytes,
        warnings=tuple(dict.fromkeys(walk.warnings)),
    )


@dataclass
class _Total:
    """Totals of one execution of a computation."""

    seconds: float = 0.0
    compute_seconds: float = 0.0
    hbm_seconds: float = 0.0
    link_seconds: float = 0.0
    link_peak_seconds: float = 0.0
    exposed_link_seconds: float = 0.0
    kernel_seconds: float = 0.0
    flops: float = 0.0
    bf16_flops: float = 0.0  # that take as long as these at the chip's peak
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0

    def add(self, other: _Total, times: float) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + times * getattr(other, each.name))


@dataclass
class _Timeline:
    """State of the units during the simulation of a computation. `total.seconds` is the clock of the instructions."""

    total: _Total = field(default_factory=_Total)
    hbm_free: float = 0.0
    links_free: list[float] = field(default_factory=lambda: [0.0, 0.0])  # for each direction of the ring
    ends: dict[str, float] = field(default_factory=dict)  # end of each asynchronous operation, by all its names
    on_links: set[str] = field(default_factory=set)  # names in `ends` that are collectives

    def use_hbm(self, seconds: float) -> float:
        """Queue an HBM transfer; returns when it ends."""
        if seconds:
            self.hbm_free = max(self.hbm_free, self.total.seconds) + seconds
            self.total.hbm_seconds += seconds
        return self.hbm_free if seconds else self.total.seconds

    def use_links(self, seconds: float, *, one_way: bool) -> float:
        """Queue a transfer on both directions of the ring, or on the one that is free first; returns when it ends."""
        end = max(self.total.seconds, min(self.links_free) if one_way else max(self.links_free)) + seconds
        if one_way:
            self.links_free[self.links_free.index(min(self.links_free))] = end
        else:
            self.links_free = [end, end]
        self.total.link_seconds += seconds / 2 if one_way else seconds
        return end

    def wait_for(self, end: float, *, for_links: bool) -> None:
        waited = max(0.0, end - self.total.seconds)
        self.total.seconds += waited
        self.total.exposed_link_seconds += waited if for_links else 0.0

    def alias(self, instruction: Instruction) -> None:
        """An instruction that reads an asynchronous value is another name for it."""
        pending = [name for name in instruction.operands if name in self.ends]
        if pending:
            self.ends[instruction.name] = max(self.ends[name] for name in pending)
            if any(name in self.on_links for name in pending):
                self.on_links.add(instruction.name)


@dataclass
class _Walk:
    program: HloProgram
    work: Work
    chip: Chip
    has_cycles: bool
    branch_shares: Sequence[float] = ()
    slowdown: Slowdown = AS_ASSUMED
    warnings: list[str] = field(default_factory=list)
    _totals: dict[str, _Total] = field(default_factory=dict)

    @property
    def efficiency(self) -> Efficiency:
        return efficiency_of(self.chip, self.slowdown)

    def run(self, computation: Computation) -> _Total:
        if computation.name not in self._totals:
            time = _Timeline()
            for instruction in computation.instructions:
                self._step(computation, instruction, time)
            self._totals[computation.name] = time.total
        return self._totals[computation.name]

    def _step(self, computation: Computation, instruction: Instruction, time: _Timeline) -> None:
        opcode = instruction.opcode
        if opcode in _FREE or (opcode == "custom-call" and target(instruction) in _FREE_TARGETS):
            time.alias(instruction)
        elif opcode in ("while", "call", "conditional"):
            self._run_inner(computation, instruction, time)
        elif opcode.endswith("-done") or self._holds_target(instruction, "AsyncCollectiveDone"):
            for name in instruction.operands:
                if name in time.ends:
                    time.wait_for(time.ends[name], for_links=name in time.on_links)
        elif opcode.endswith("-update"):
            time.alias(instruction)
        elif opcode.endswith("-start") or self._holds_target(instruction, "AsyncCollectiveStart"):
            self._start(computation, instruction, time)
        elif is_kernel(instruction):
            self._kernel(computation, instruction, time)
        else:
            self._compute(computation, instruction, time)

    def _run_inner(self, computation: Computation, instruction: Instruction, time: _Timeline) -> None:
        """Add a loop body times its trip count, a call once, branches by their shares (if unknown, the longest)."""
        if RARE in instruction.attributes:
            return
        times: int | None = 1
        if instruction.opcode == "while":
            times = trip_count(self.program, computation, instruction)
            if times is None:
                self.warnings.append(f"unknown trip count of loop {instruction.name}: counted once")
        inner = [self.run(self.program.computations[name]) for name in self._inner_names(instruction)]
        skips = len({total.flops > 0 for total in inner}) > 1  # as the loss does with chunks that have no weight
        if instruction.opcode == "conditional" and len(inner) == len(self.branch_shares) and not skips:
            for total, share in zip(inner, self.branch_shares, strict=True):
                time.total.add(total, share)
        elif inner:
            time.total.add(max(inner, key=lambda total: total.seconds), times or 1)

    def _inner_names(self, instruction: Instruction) -> list[str]:
        if instruction.opcode == "conditional":
            listed = re.findall(r"[\w.\-]+", instruction.braced("branch_computations") or "")
            names = listed or [instruction.attribute(f"{side}_computation") for side in ("true", "false")]
        else:
            names = [instruction.attribute("body" if instruction.opcode == "while" else "to_apply")]
        return [name for name in names if name in self.program.computations]

    def _holds_target(self, instruction: Instruction, name: str) -> bool:
        """Whether this is a fusion that starts or ends a collective, and does nothing else."""
        if instruction.opcode != "fusion" or not instruction.name.startswith("async-collective"):
            return False
        inner = self.program.called(instruction)
        return inner is not None and any(i.opcode == "custom-call" and target(i) == name for i in inner.instructions)

    def _start(self, computation: Computation, start: Instruction, time: _Timeline) -> None:
        transfer = self.work.transfer(computation, start)
        if transfer is not None:
            time.ends[start.name] = self._transfer(start, transfer, time)
            time.on_links.add(start.name)
        elif any(shape.memory_space == HOST for shape in start.shapes):
            self.warnings.append("copies between device and host are not timed")
        elif start.opcode.removesuffix("-start") in ("copy", "slice", "dynamic-slice", "dynamic-update-slice"):
            time.ends[start.name] = time.use_hbm(self._hbm_seconds(self.work.copied_bytes(start), time))
        elif (inner := self.program.called(start, "calls", "to_apply")) is not None:
            time.total.add(self.run(inner), 1)  # another stream on the same units: no speedup

    def _transfer(self, instruction: Instruction, transfer: Transfer, time: _Timeline) -> float:
        """Start a collective; returns when it ends."""
        time.use_hbm(self._hbm_seconds(sum(self.work.in_hbm(shape) for shape in instruction.shapes), time))
        if transfer.num_devices <= 1:
            return time.total.seconds
        if not self.chip.link_gb_per_second:
            self.warnings.append("unknown link bandwidth: transfers between devices are not timed")
            return time.total.seconds
        peak = transfer.link_bytes / (self._lanes(transfer) * self.chip.link_gb_per_second * 1e9)
        time.total.link_bytes += transfer.link_bytes
        time.total.link_peak_seconds += peak / 2 if transfer.one_way else peak
        seconds = peak / self.efficiency.links + HOP_SECONDS * min(transfer.num_devices, MAX_HOPS)
        return time.use_links(seconds, one_way=transfer.one_way)

    def _lanes(self, transfer: Transfer) -> int:
        """Number of links a device sends on at once, as the compiler states it if it does."""
        if self.work.on_gpu or transfer.one_way:
            return 1
        return 2 * transfer.torus_dims if transfer.torus_dims else num_lanes(self.chip, transfer.num_devices)

    def _hbm_seconds(self, num_bytes: float, time: _Timeline, share: float = 1.0) -> float:
        """`share`: of the bandwidth that others reach."""
        time.total.hbm_bytes += num_bytes
        return num_bytes / (self.chip.hbm_gb_per_second * 1e9 * self.efficiency.hbm * share)

    def _kernel(self, computation: Computation, kernel: Instruction, time: _Timeline) -> None:
        if (grouped := grouped_product(computation, kernel)) is not None:
            self._grouped_product(computation, kernel, grouped, time)
            return
        flops = kernel_flops(self.program, computation, kernel)
        if flops is None:
            self.warnings.append(f"unknown flops of kernel {kernel.name}: timed by its memory traffic")
        peak = self.chip.bf16_tflops * 1e12
        attention = None if self.work.on_gpu else attention_work(self.program, computation, kernel)
        if attention is None:
            seconds = (flops or 0.0) / (peak * self._kernel_efficiency(computation, kernel))
        else:
            seconds = attention.seconds(self.chip.matrix_unit, peak * self.efficiency.attention)
        start = time.total.seconds
        memory_end = time.use_hbm(self._hbm_seconds(self.work.hbm_bytes(computation, kernel), time))
        time.total.flops += flops or 0.0
        time.total.bf16_flops += flops or 0.0
        time.total.seconds = max(start + seconds, memory_end) + self.efficiency.launch_seconds
        time.wait_for(time.use_hbm(self._hbm_seconds(extra_bytes(computation, kernel), time)), for_links=False)
        time.total.kernel_seconds += time.total.seconds - start

    def _kernel_efficiency(self, computation: Computation, kernel: Instruction) -> float:
        efficiency = self.efficiency
        share = efficiency.narrow if (head_width(computation, kernel) or math.inf) <= NARROW_HEADS else 1.0
        return efficiency.kernel * share * (efficiency.masked if MASKED_ATTENTION in target(kernel) else 1.0)

    def _grouped_product(
        self, computation: Computation, kernel: Instruction, grouped: GroupedProduct, time: _Timeline
    ) -> None:
        """As fast as other products, but by whole tiles and with a cost for each tile."""
        seconds = grouped.flops / (self.chip.bf16_tflops * 1e12 * self.efficiency.product)
        seconds += grouped.num_steps * GRID_STEP_SECONDS
        start = time.total.seconds
        memory_end = time.use_hbm(self._hbm_seconds(grouped.hbm_bytes, time))
        time.total.flops += kernel_flops(self.program, computation, kernel) or grouped.flops
        time.total.seconds = max(start + seconds, memory_end)
        time.total.kernel_seconds += time.total.seconds - start

    def _compute(self, computation: Computation, instruction: Instruction, time: _Timeline) -> None:
        transfer = self.work.transfer(computation, instruction)
        flops = self.work.flops(computation, instruction)
        if transfer is not None and not transfer.is_piece:
            time.wait_for(self._transfer(instruction, transfer, time), for_links=True)
            if not flops:
                return
        seconds = self._compute_seconds(computation, instruction, flops)
        is_triton = instruction.opcode == "custom-call" and target(instruction) == TRITON
        share = self.efficiency.triton if is_triton else 1.0
        memory_end = time.use_hbm(self._hbm_seconds(self.work.hbm_bytes(computation, instruction), time, share))
        time.total.flops += flops
        is_doubled = self._times_faster(computation, instruction) > 1
        time.total.bf16_flops += flops / 2 if is_doubled else flops
        time.total.compute_seconds += seconds
        time.total.seconds = max(time.total.seconds + seconds, memory_end) + self.efficiency.launch_seconds
        if transfer is not None:
            time.alias(instruction)

    def _compute_seconds(self, computation: Computation, instruction: Instruction, flops: float) -> float:
        clock = self.chip.clock_ghz * 1e9
        cycles = instruction.config_number("estimated_cycles") or 0
        if self.has_cycles and cycles < UNKNOWN_CYCLES and (cycles or not flops):
            return cycles / clock * (self.slowdown.compute if flops else VECTOR_CYCLES)
        peak = self.chip.bf16_tflops * 1e12 * self.efficiency.product
        peak *= self._times_faster(computation, instruction)
        product = self.work.filled_flops(computation, instruction) / peak
        if self.work.on_gpu:  # the vector units keep up with HBM
            return product
        # A TPU instruction bundle drives all units at once, so fused operations run in parallel with the product.
        vector = self.work.vector_operations(computation, instruction) / VECTOR_OPERATIONS_PER_CYCLE / clock
        return max(product, vector) if flops or instruction.opcode != "fusion" else vector + FUSION_SECONDS

    def _times_faster(self, computation: Computation, instruction: Instruction) -> float:
        """Rate of the products of an instruction, relative to bfloat16. A GPU is twice as fast with half the bits; a
        TPU multiplies all types but its 8-bit formats as bfloat16."""
        bits = self.work.operand_bits(computation, instruction) or 16
        if self.work.on_gpu:
            return 16 / bits
        return TPU_8_BITS if bits == 8 and self.chip.doubled else 1.0
