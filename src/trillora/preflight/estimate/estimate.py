"""Estimates memory and time of a training step from its trace, for machines without the TPU compiler.

Arguments are exact: their shapes and shardings are known. For the rest we walk the traced program in order and count
what a compiler must keep in memory: results of matmuls, kernels and loops, and elementwise results that several of
those need. Other elementwise operations are fused and need no memory. A weight sharded over devices counts whole while
matmuls use it. Time is work divided by the chip's figures, loop by loop. For `traced`'s example, tanh(x @ w) * 2:

    schedule(program):  product      reads x, w   writes x @ w: 4096 bytes
                        elementwise  fused into the output
    peak:               arguments + 4096 bytes + w gathered: 32 * 128 * 4 bytes

What depends on the compiler (its instruction order, its padding, how well it hides transfers) is in `Calibration`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import jax
from jax.sharding import Mesh

from trillora.devices.chips import CHIPS, Chip
from trillora.devices.mesh import FSDP_AXIS
from trillora.engine.quantize import item_bytes
from trillora.preflight.estimate.traced import Operation, TracedProgram, Value, read_program
from trillora.preflight.hlo.simulate import (
    AS_ASSUMED,
    FUSION_SECONDS,
    HOP_SECONDS,
    MAX_HOPS,
    TPU_8_BITS,
    VECTOR_OPERATIONS_PER_CYCLE,
    Efficiency,
    Slowdown,
    efficiency_of,
    num_lanes,
)
from trillora.step.build import Assembly

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig


@dataclass(frozen=True)
class Calibration:
    """What neither the trace nor the chip's figures determine. Fitted to the compiler's results in `records.json`."""

    near_bytes: int = 8 * 2**20  # results up to this size stay in on-chip memory until they are used
    # Gathers overlap with matmuls on these chips, in groups of at least this many devices. Otherwise matmuls wait.
    overlapped_from: tuple[tuple[Chip, int], ...] = (
        (CHIPS["v4"], 4),
        (CHIPS["v5e"], 8),
        (CHIPS["v5p"], 4),
        (CHIPS["v6e"], 8),
    )
    far_apart: int = 80  # outside loops, a weight is gathered again after this many matmuls


CALIBRATION = Calibration()
LOOKUP_COPIES = 2  # of all embeddings: as looked up in a sharded table, and with the rows of other shards masked


@dataclass(frozen=True)
class Estimate:
    """One step on one device. Arguments, gathered weights, activations and logits add up to the peak."""

    peak_bytes: float
    arguments: dict[str, float]  # base, adapter, optimizer, batch
    gathered_bytes: float  # gathered weights at the peak
    activations_bytes: float
    logits_bytes: float
    step_seconds: float
    roofline_seconds: float  # from the flops alone
    flops: float
    tokens: float  # of the batch, divided by the number of devices


def estimate(
    assembly: Assembly, chip: Chip, calibration: Calibration = CALIBRATION, slowdown: Slowdown = AS_ASSUMED
) -> Estimate:
    program = trace(assembly)
    vocabulary = assembly.model.module.config.get_text_config().vocab_size
    arguments = argument_bytes(assembly)
    held = _Memory(calibration, vocabulary).peak(program)
    work = _Time(calibration, chip, slowdown).work(program)
    batch = assembly.batch_shapes["tokens"]
    return Estimate(
        peak_bytes=sum(arguments.values()) + held.total,
        arguments=arguments,
        gathered_bytes=held.gathered,
        activations_bytes=held.activations,
        logits_bytes=held.logits,
        step_seconds=work.seconds,
        roofline_seconds=work.bf16_flops / (chip.bf16_tflops * 1e12),
        flops=work.flops,
        tokens=math.prod(batch.shape) / assembly.mesh.size,
    )


def argument_bytes(assembly: Assembly) -> dict[str, float]:
    """Bytes on one device before and after the step, by part."""
    state = assembly.state_shapes
    parts = {
        "base": assembly.base_shapes,
        "adapter": state.adapter,
        "optimizer": (state.step, state.optimizer, state.key, state.typical),
        "batch": assembly.batch_shapes,
    }
    return {part: sum(_local_bytes(leaf) for leaf in jax.tree.leaves(tree)) for part, tree in parts.items()}


def trace(assembly: Assembly) -> TracedProgram:
    """Traces the training step without compiling it."""
    inputs = [_argument(leaf, assembly.mesh) for leaf in jax.tree.leaves(assembly.arguments())]
    return read_program(assembly.traced.jaxpr, inputs, assembly.mesh.size, kind_shares(assembly.model.module.config))


def kind_shares(config: PretrainedConfig) -> list[float]:
    """Fraction of layers of each kind, starting with the kind of the first layer, as in `model.stack`."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    return [count / len(kinds) for count in Counter(kinds).values()]


def _local_bytes(leaf: jax.ShapeDtypeStruct) -> float:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
        return float(math.prod(leaf.shape) * leaf.dtype.itemsize)
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * item_bytes(leaf.dtype)


def _argument(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> Value:
    """Weights sharded over the fsdp axis are gathered before use, so they count as whole. The batch and the tensor axis
    stay split."""
    itemsize = item_bytes(leaf.dtype)
    spec = [*leaf.sharding.spec, *(None,) * len(leaf.shape)][: len(leaf.shape)]
    splits, gather_over = [], 1
    for axes in spec:
        names = axes if isinstance(axes, tuple) else () if axes is None else (axes,)
        if names == (FSDP_AXIS,):
            gather_over *= mesh.shape[FSDP_AXIS]
            names = ()
        splits.append(math.prod(mesh.shape[name] for name in names))
    return Value(tuple(leaf.shape), itemsize, tuple(splits), gather_over)


@dataclass
class _Step:
    """An operation, the values it reads from memory and those it writes. Fused operations do neither: readers of their
    result read their operands instead."""

    operation: Operation | None  # None: results are returned
    reads: set[Value]
    writes: list[Value] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.operation.kind if self.operation is not None else "return"


def schedule(program: TracedProgram) -> list[_Step]:
    """The needed operations in traced order, with their memory reads and writes. Elementwise operations are fused into
    their readers, unless their result must be in memory: see `_is_held`."""
    operations = _needed(program)
    uses: Counter[Value] = Counter()
    unfused_uses: Counter[Value] = Counter()
    forced = {v.origin for v in program.outputs[: program.num_carry]}
    for operation in operations:
        inputs = {v.origin for v in operation.inputs}
        uses.update(inputs)
        if operation.kind != "elementwise":
            unfused_uses.update(inputs)
        if operation.kind in ("kernel", "loop"):
            forced |= inputs
    returned = {v.origin for v in program.outputs[program.num_carry :]} if program.is_body else set()
    roots: dict[Value, set[Value]] = {v: {v} for v in program.inputs}
    steps: list[_Step] = []

    def roots_of(values: Iterable[Value]) -> set[Value]:
        return set().union(*(roots.get(v.origin, set()) for v in values))

    for operation in operations:
        reads = roots_of(operation.inputs)
        held = [
            v
            for v in operation.outputs
            if operation.kind != "elementwise"
            or v in forced
            or _is_held(v, reads, uses=uses[v], unfused_uses=unfused_uses[v])
        ]
        roots.update({v: {v} if v in held else reads for v in operation.outputs})
        if held or operation.kind == "elementwise":
            steps.append(_Step(operation, reads if held else set(), held))
        # A loop writes a slice to the stacked result as soon as it is computed.
        if ready := returned.intersection(operation.outputs):
            steps.append(_Step(None, roots_of(ready)))
    last = program.outputs[: program.num_carry] if program.is_body else program.outputs
    steps.append(_Step(None, roots_of(last)))
    return steps


def _needed(program: TracedProgram) -> list[Operation]:
    """Drop the operations whose results are not used."""
    used = {v.origin for v in program.outputs}
    kept = []
    for operation in reversed(program.operations):
        if any(v in used for v in operation.outputs):
            used.update(v.origin for v in operation.inputs)
            kept.append(operation)
    return kept[::-1]


def _is_held(value: Value, reads: set[Value], *, uses: int, unfused_uses: int) -> bool:
    """A result that two matmuls need is computed once and kept. So is a result with several readers that was computed
    from two or more arrays of its size, such as the residual stream."""
    if unfused_uses >= 2:
        return True
    large = [v for v in reads if v.num_bytes >= value.num_bytes]
    return uses >= 2 and len(large) >= 2


@dataclass(frozen=True)
class _Held:
    """Bytes in memory at one time, in addition to the arguments."""

    gathered: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def total(self) -> float:
        return self.gathered + self.activations + self.logits

    def __add__(self, other: _Held) -> _Held:
        return _Held(self.gathered + other.gathered, self.activations + other.activations, self.logits + other.logits)


@dataclass(frozen=True)
class _Memory:
    calibration: Calibration
    vocabulary: int

    def peak(self, program: TracedProgram) -> _Held:
        """The largest sum held at one time. Inputs are counted outside, except for a loop's carry, which the body may
        overwrite."""
        steps = schedule(program)
        last_read = {v: at for at, step in enumerate(steps) for v in step.reads}
        gathers = _gathers(steps, math.inf if program.is_body else self.calibration.far_apart)
        live = {v for v in program.carry_inputs if v in last_read}
        peak = self._held(live)
        for at, step in enumerate(steps):
            dying = {v for v in live if last_read.get(v, -1) <= at}
            # A gather starts one step ahead, to finish in time.
            whole = _Held(gathered=sum(g.value.num_bytes for g in gathers if g.first - 1 <= at <= g.last))
            if step.kind == "elementwise":
                # The result overwrites an operand that is not needed again.
                during, after = live - dying | set(step.writes), live - dying | set(step.writes)
            elif step.kind == "loop":
                assert step.operation is not None and step.operation.body is not None
                num_carry = step.operation.body.num_carry
                stacked = {v for v in step.operation.outputs[num_carry:] if v in last_read}
                starts = {v.origin for v in step.operation.inputs[step.operation.body.num_constants :][:num_carry]}
                during, after = live - (dying & starts) | stacked, live - dying | set(step.writes)
                whole += self.peak(step.operation.body)
            else:
                during, after = live | set(step.writes), live - dying | set(step.writes)
                if step.operation is not None and step.operation.name == "gather":
                    whole += _Held(activations=LOOKUP_COPIES * step.operation.partial_bytes)
            peak = max(peak, self._held(during) + whole, key=lambda held: held.total)
            live = {v for v in after if last_read.get(v, -1) > at}
        return peak

    def _held(self, values: Iterable[Value]) -> _Held:
        logits = activations = 0.0
        for value in values:
            if self.vocabulary in value.shape:
                logits += value.num_bytes
            else:
                activations += value.num_bytes
        return _Held(activations=activations, logits=logits)


class _Gather(NamedTuple):
    """A sharded weight that is gathered, from its first to its last use."""

    value: Value
    first: int
    last: int


def _gathers(steps: list[_Step], far_apart: float) -> list[_Gather]:
    gathers: list[_Gather] = []
    newest: dict[Value, tuple[int, int]] = {}  # index of its gather, and of the last matmul that used it
    products = [(at, step) for at, step in enumerate(steps) if step.kind == "product"]
    for number, (at, step) in enumerate(products):
        for value in step.reads:
            if value.gather_over == 1:
                continue
            if value in newest and number - newest[value][1] <= far_apart:
                which = newest[value][0]
                gathers[which] = gathers[which]._replace(last=at)
            else:
                which = len(gathers)
                gathers.append(_Gather(value, at, at))
            newest[value] = which, number
    return gathers


@dataclass(frozen=True)
class _Work:
    seconds: float
    flops: float
    bf16_flops: float  # that take as long as these at the chip's peak


def _is_fused(operation: Operation) -> bool:
    """Reductions are fused with the operations before them."""
    return operation.kind == "elementwise" or operation.name.startswith("reduce_") or operation.is_vector_product


@dataclass
class _Fusion:
    """Operations between two matmuls. Each value is read once; results are available without another read."""

    vector_seconds: float = 0.0
    read: set[Value] = field(default_factory=set)
    written: set[Value] = field(default_factory=set)


@dataclass(frozen=True)
class _Time:
    calibration: Calibration
    chip: Chip
    slowdown: Slowdown = AS_ASSUMED

    def work(self, program: TracedProgram) -> _Work:
        """Two clocks: one computes in order, the other transfers. All gathers start at the beginning and finish in the
        order of their use; an operation waits for the transfers it depends on."""
        steps = schedule(program)
        last_read = {v: at for at, step in enumerate(steps) for v in step.reads}
        inputs = set(program.inputs)
        products = {v for step in steps if step.kind == "product" for v in step.writes}
        now = link = flops = bf16_flops = 0.0
        ready: dict[tuple[Value, int], float] = {}  # when a weight is gathered, by the step that needs it first
        for gather in _gathers(steps, math.inf if program.is_body else self.calibration.far_apart):
            seconds = self._transfer(gather.value.num_bytes, gather.value.gather_over)
            if self._overlaps(gather.value.gather_over):
                link += seconds
                ready[gather.value, gather.first] = link
            else:
                now += seconds
        reduced: dict[Value, float] = {}  # when partial sums are reduced
        fusion = _Fusion()
        for at, step in enumerate(steps):
            now = max([now, *(max(ready.get((v, at), 0.0), reduced.get(v, 0.0)) for v in step.reads)])
            operation = step.operation
            if operation is not None and _is_fused(operation):
                ending = {v for v in step.reads & products if last_read[v] == at}
                self._fuse(fusion, step, ending)
            else:
                if fusion.read:
                    vector = fusion.vector_seconds + FUSION_SECONDS
                    now += max(vector, self._traffic(fusion.read, fusion.written, inputs))
                fusion = _Fusion()
            if operation is None:
                continue
            if operation.body is not None:
                body = self.work(operation.body)
                now += operation.length * body.seconds
                flops += operation.length * body.flops
                bf16_flops += operation.length * body.bf16_flops
            elif not _is_fused(operation):
                # A lookup reads what it returns, not the whole table.
                read = set(step.writes) if operation.name == "gather" else step.reads
                now += max(self._product(operation), self._traffic(read, set(step.writes), inputs))
                flops += operation.flops
                bf16_flops += operation.flops / (2 if self._has_8_bits(operation) else 1)
            if operation.sent_bytes:  # nothing else is ready to be computed until tokens have arrived
                now += self._transfer(operation.sent_bytes, operation.sent_over)
            if operation.partial_bytes:
                # An all-reduce sends everything twice. It goes ahead of gathers that are not needed yet.
                seconds = 2 * self._transfer(operation.partial_bytes, operation.partial_over)
                link += seconds
                reduced.update(dict.fromkeys(operation.outputs, now + seconds))
        return _Work(max(now, link), flops, bf16_flops)

    def _fuse(self, fusion: _Fusion, step: _Step, ending: set[Value]) -> None:
        """An operation that is the only reader of a matmul's result is fused into the matmul: one array fewer is
        read, and the matmul already counted the write."""
        assert step.operation is not None
        fusion.vector_seconds += self._vector(step.operation)
        fusion.read |= step.reads - fusion.written
        if ending and step.kind == "elementwise":
            fusion.read.discard(max(ending, key=lambda v: v.num_bytes))
        else:
            fusion.written |= set(step.writes)

    def _overlaps(self, num_devices: int) -> bool:
        return num_devices >= dict(self.calibration.overlapped_from).get(self.chip, math.inf)

    @property
    def _efficiency(self) -> Efficiency:
        return efficiency_of(self.chip, self.slowdown)

    def _product(self, operation: Operation) -> float:
        """Products are padded to whole tiles of the matrix unit."""
        peak = self.chip.bf16_tflops * 1e12
        side = self.chip.matrix_unit
        if operation.kind == "kernel":
            if operation.attention is not None and self.chip.torus_dims:
                return operation.attention.seconds(side, peak * self._efficiency.attention)
            return operation.flops / (peak * self._efficiency.kernel)
        if operation.product is None:
            return 0.0
        batch, *sizes = operation.product
        padded = [math.ceil(size / side) * side for size in sizes]
        seconds = 2 * batch * math.prod(padded) / (peak * self._efficiency.product)
        return seconds / TPU_8_BITS if self._has_8_bits(operation) else seconds

    def _has_8_bits(self, operation: Operation) -> bool:
        """Such matmuls are in a format that the chip has: others are refused (`step.decisions`)."""
        has_8_bits = operation.kind == "product" and all(v.itemsize <= 1 for v in operation.inputs[:2])
        return has_8_bits and bool(self.chip.doubled)

    def _vector(self, operation: Operation) -> float:
        """One operation per element of the result, or of the operand of a reduction."""
        if self.chip.torus_dims == 0:
            return 0.0  # a GPU's vector units keep up with HBM
        values = operation.outputs if operation.kind == "elementwise" else operation.inputs
        numbers = max((v.num_elements for v in values), default=0.0)
        return numbers / (VECTOR_OPERATIONS_PER_CYCLE * self.chip.clock_ghz * 1e9)

    def _traffic(self, read: set[Value], written: set[Value], inputs: set[Value]) -> float:
        """HBM traffic; small results never leave the chip."""
        near = self.calibration.near_bytes
        num_bytes = sum(v.num_bytes for v in read if v in inputs or v.num_bytes > near)
        num_bytes += sum(v.num_bytes for v in written if v.num_bytes > near)
        return num_bytes / (self.chip.hbm_gb_per_second * 1e9 * self._efficiency.hbm)

    def _transfer(self, num_bytes: float, num_devices: int) -> float:
        """A ring transfer in both directions."""
        if num_devices == 1 or not self.chip.link_gb_per_second:
            return 0.0
        bandwidth = num_lanes(self.chip, num_devices) * self.chip.link_gb_per_second * 1e9 * self._efficiency.links
        return num_bytes * (num_devices - 1) / num_devices / bandwidth + HOP_SECONDS * min(num_devices, MAX_HOPS)
