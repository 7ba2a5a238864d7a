"""Memory and time of a training step where the TPU compiler does not exist, from the traced step alone.

Arguments are exact: shapes and where they lie. The rest is what a compiler cannot avoid holding at once, found by
walking the traced program in order: results of products, kernels and loops, and arithmetic that several of those need;
arithmetic in between is fused and costs nothing. A weight that is split over devices is whole while products use it.
Time is work divided by the chip's figures, loop by loop.

What is left to the compiler (its order of instructions, its padding, how well it hides transfers) is in `Calibration`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from trillora.devices.chips import CHIPS, Chip
from trillora.devices.mesh import FSDP_AXIS
from trillora.preflight.estimate.traced import Operation, TracedProgram, Value, read_program
from trillora.preflight.hlo.simulate import (
    GPU,
    HOP_SECONDS,
    LARGE_GROUP,
    MAX_HOPS,
    TPU,
    TPU_LARGE_UNIT,
    VECTOR_OPERATIONS_PER_CYCLE,
    Efficiency,
)
from trillora.step.build import Assembly


@dataclass(frozen=True)
class Calibration:
    """What neither the traced step nor the chips' figures say. Source: what the TPU compiler did with the steps of
    `records.json`."""

    near_bytes: int = 8 * 2**20  # results up to this size stay in the chip's vector memory until they are used
    # Where gathers run beside products: in groups of at least so many devices, on these chips. Else all wait for them.
    overlapped_from: int = 8
    overlapping: tuple[Chip, ...] = (CHIPS["v5e"],)
    far_apart: int = 80  # products between two uses of a weight, outside loops, past which it is gathered again


CALIBRATION = Calibration()
LOOKUP_COPIES = 2  # of all rows: as looked up in a split table, and with those of other parts hidden


@dataclass(frozen=True)
class Estimate:
    """One device, one step. Arguments, gathered weights, activations and logits add up to the peak."""

    peak_bytes: float
    arguments: dict[str, float]  # base, adapter, optimizer, batch
    gathered_bytes: float  # weights made whole, at the peak
    activations_bytes: float
    logits_bytes: float
    step_seconds: float
    roofline_seconds: float  # of the arithmetic alone
    flops: float
    tokens: float  # of the batch, divided by the number of devices


def estimate(assembly: Assembly, chip: Chip, calibration: Calibration = CALIBRATION) -> Estimate:
    program = trace(assembly)
    vocabulary = assembly.model.module.config.get_text_config().vocab_size
    arguments = argument_bytes(assembly)
    held = _Memory(calibration, vocabulary).peak(program)
    work = _Time(calibration, chip).work(program)
    batch = assembly.batch_shapes["tokens"]
    return Estimate(
        peak_bytes=sum(arguments.values()) + held.total,
        arguments=arguments,
        gathered_bytes=held.gathered,
        activations_bytes=held.activations,
        logits_bytes=held.logits,
        step_seconds=work.seconds,
        roofline_seconds=work.flops / (chip.bf16_tflops * 1e12),
        flops=work.flops,
        tokens=math.prod(batch.shape) / assembly.mesh.size,
    )


def argument_bytes(assembly: Assembly) -> dict[str, float]:
    """What lies on one device before the step begins and after it has ended."""
    state = assembly.state_shapes
    parts = {
        "base": assembly.base_shapes,
        "adapter": state.adapter,
        "optimizer": (state.step, state.optimizer, state.key, state.typical),
        "batch": assembly.batch_shapes,
    }
    return {part: sum(_local_bytes(leaf) for leaf in jax.tree.leaves(tree)) for part, tree in parts.items()}


def trace(assembly: Assembly) -> TracedProgram:
    """The step that trains, traced and not compiled."""
    arguments = (assembly.state_shapes, assembly.base_shapes, assembly.batch_shapes)
    closed = jax.make_jaxpr(assembly.train_step)(*arguments)
    inputs = [_argument(leaf, assembly.mesh) for leaf in jax.tree.leaves(arguments)]
    return read_program(closed, inputs, assembly.mesh.size, kind_shares(assembly.model.module.config))


def kind_shares(config: Any) -> list[float]:
    """What part of the layers is of each kind, the first layer's kind first, as `model.stack` tells them apart."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    return [count / len(kinds) for count in Counter(kinds).values()]


def _local_bytes(leaf: Any) -> float:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
        return float(math.prod(leaf.shape) * leaf.dtype.itemsize)
    return float(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)


def _argument(leaf: Any, mesh: Mesh) -> Value:
    """Weights split over the fsdp axis are gathered to be used, so they count as whole there; rows and the tensor axis
    stay split."""
    itemsize = float(getattr(leaf.dtype, "itemsize", 0))
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
    """An operation, the values it reads in memory and those it leaves there. Fused arithmetic does neither: what reads
    its result reads what it was made of."""

    operation: Operation | None  # None where results are handed over
    reads: set[Value]
    writes: list[Value] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.operation.kind if self.operation is not None else "hand over"


def schedule(program: TracedProgram) -> list[_Step]:
    """The operations that are needed, in the order they were traced, with what each of them does to memory. Arithmetic
    is fused into what reads it, unless its result has to be in memory: see `_is_held`."""
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
    handed_over = {v.origin for v in program.outputs[program.num_carry :]} if program.is_body else set()
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
        # A loop's slices go into their place in the stacked result as soon as they are known.
        if ready := handed_over.intersection(operation.outputs):
            steps.append(_Step(None, roots_of(ready)))
    last = program.outputs[: program.num_carry] if program.is_body else program.outputs
    steps.append(_Step(None, roots_of(last)))
    return steps


def _needed(program: TracedProgram) -> list[Operation]:
    """Without the operations whose results nothing uses."""
    used = {v.origin for v in program.outputs}
    kept = []
    for operation in reversed(program.operations):
        if any(v in used for v in operation.outputs):
            used.update(v.origin for v in operation.inputs)
            kept.append(operation)
    return kept[::-1]


def _is_held(value: Value, reads: set[Value], *, uses: int, unfused_uses: int) -> bool:
    """Arithmetic that two products need is computed once and kept; so is a sum that several need and that stands for
    two or more arrays as large as itself, as the residual stream does."""
    if unfused_uses >= 2:
        return True
    large = [v for v in reads if v.num_bytes >= value.num_bytes]
    return uses >= 2 and len(large) >= 2


@dataclass(frozen=True)
class _Held:
    """Bytes in memory at once, beside the arguments."""

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
        """The most that is held at once. Inputs lie outside and are counted there, but for a loop's carry, which the
        body may write over."""
        steps = schedule(program)
        last_read = {v: at for at, step in enumerate(steps) for v in step.reads}
        gathers = _gathers(steps, math.inf if program.is_body else self.calibration.far_apart)
        live = {v for v in program.carry_inputs if v in last_read}
        peak = self._held(live)
        for at, step in enumerate(steps):
            dying = {v for v in live if last_read.get(v, -1) <= at}
            # A gather is asked for one step ahead, to arrive in time.
            whole = _Held(gathered=sum(g.value.num_bytes for g in gathers if g.first - 1 <= at <= g.last))
            if step.kind == "elementwise":
                # One pass over the operands writes over one that nobody needs again.
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
    """A split weight made whole, from its first to its last use."""

    value: Value
    first: int
    last: int


def _gathers(steps: list[_Step], far_apart: float) -> list[_Gather]:
    gathers: list[_Gather] = []
    newest: dict[Value, tuple[int, int]] = {}  # number of its gather, of the product that used it last
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


def _is_fused(operation: Operation) -> bool:
    """Sums join the arithmetic before them."""
    return operation.kind == "elementwise" or operation.name.startswith("reduce_") or operation.is_vector_product


@dataclass
class _Fusion:
    """Arithmetic between two products. What it reads, it reads once; what it makes is at hand for what follows."""

    vector_seconds: float = 0.0
    read: set[Value] = field(default_factory=set)
    written: set[Value] = field(default_factory=set)


@dataclass(frozen=True)
class _Time:
    calibration: Calibration
    chip: Chip

    def work(self, program: TracedProgram) -> _Work:
        """Two clocks: one computes in order, the other transfers. Gathers are asked for at the beginning and arrive in
        the order of their use; whoever needs a transfer's result waits for it."""
        steps = schedule(program)
        last_read = {v: at for at, step in enumerate(steps) for v in step.reads}
        inputs = set(program.inputs)
        products = {v for step in steps if step.kind == "product" for v in step.writes}
        now = link = flops = 0.0
        ready: dict[tuple[Value, int], float] = {}  # when a weight is whole, by the step that needs it first
        for gather in _gathers(steps, math.inf if program.is_body else self.calibration.far_apart):
            seconds = self._transfer(gather.value.num_bytes, gather.value.gather_over)
            if self._overlaps(gather.value.gather_over):
                link += seconds
                ready[gather.value, gather.first] = link
            else:
                now += seconds
        added_up: dict[Value, float] = {}
        fusion = _Fusion()
        for at, step in enumerate(steps):
            now = max([now, *(max(ready.get((v, at), 0.0), added_up.get(v, 0.0)) for v in step.reads)])
            operation = step.operation
            if operation is not None and _is_fused(operation):
                ending = {v for v in step.reads & products if last_read[v] == at}
                self._fuse(fusion, step, ending)
            else:
                now += max(fusion.vector_seconds, self._traffic(fusion.read, fusion.written, inputs))
                fusion = _Fusion()
            if operation is None:
                continue
            if operation.body is not None:
                body = self.work(operation.body)
                now += operation.length * body.seconds
                flops += operation.length * body.flops
            elif not _is_fused(operation):
                # A lookup reads what it returns, not the whole table.
                read = set(step.writes) if operation.name == "gather" else step.reads
                now += max(self._product(operation), self._traffic(read, set(step.writes), inputs))
                flops += operation.flops
            if operation.partial_bytes:
                # Partial sums go around twice, added up and handed to all, before gathers that are not urgent.
                seconds = 2 * self._transfer(operation.partial_bytes, operation.partial_over)
                link += seconds
                added_up.update(dict.fromkeys(operation.outputs, now + seconds))
        return _Work(max(now, link), flops)

    def _fuse(self, fusion: _Fusion, step: _Step, ending: set[Value]) -> None:
        """Arithmetic on a product's result that nothing else reads is done before the product writes it: one array
        fewer is read, and the result was counted as the product's."""
        assert step.operation is not None
        fusion.vector_seconds += self._vector(step.operation)
        fusion.read |= step.reads - fusion.written
        if ending and step.kind == "elementwise":
            fusion.read.discard(max(ending, key=lambda v: v.num_bytes))
        else:
            fusion.written |= set(step.writes)

    def _overlaps(self, num_devices: int) -> bool:
        return num_devices >= self.calibration.overlapped_from and self.chip in self.calibration.overlapping

    @property
    def _efficiency(self) -> Efficiency:
        if self.chip.torus_dims == 0:
            return GPU
        return TPU_LARGE_UNIT if self.chip.matrix_unit > 128 else TPU

    def _product(self, operation: Operation) -> float:
        """Products fill whole tiles of the matrix unit; a kernel's are as narrow as its heads."""
        peak = self.chip.bf16_tflops * 1e12
        side = self.chip.matrix_unit
        if operation.kind == "kernel":
            filled = min(1.0, operation.width / side) if operation.width else 1.0
            return operation.flops / (peak * self._efficiency.kernel * filled)
        if operation.product is None:
            return 0.0
        batch, *sizes = operation.product
        padded = [math.ceil(size / side) * side for size in sizes]
        return 2 * batch * math.prod(padded) / (peak * self._efficiency.product)

    def _vector(self, operation: Operation) -> float:
        """One operation for each number of the result, or of what is summed up."""
        if self.chip.torus_dims == 0:
            return 0.0  # a GPU's vector units keep up with its memory
        values = operation.outputs if operation.kind == "elementwise" else operation.inputs
        numbers = max((v.num_elements for v in values), default=0.0)
        return numbers / (VECTOR_OPERATIONS_PER_CYCLE * self.chip.clock_ghz * 1e9)

    def _traffic(self, read: set[Value], written: set[Value], inputs: set[Value]) -> float:
        """Between HBM and the chip; small results never leave the chip."""
        near = self.calibration.near_bytes
        num_bytes = sum(v.num_bytes for v in read if v in inputs or v.num_bytes > near)
        num_bytes += sum(v.num_bytes for v in written if v.num_bytes > near)
        return num_bytes / (self.chip.hbm_gb_per_second * 1e9 * self._efficiency.hbm)

    def _transfer(self, num_bytes: float, num_devices: int) -> float:
        """Around a ring, in both directions."""
        if num_devices == 1 or not self.chip.link_gb_per_second:
            return 0.0
        lanes = 2 * (self.chip.torus_dims if num_devices >= LARGE_GROUP and self.chip.torus_dims == 3 else 1)
        bandwidth = lanes * self.chip.link_gb_per_second * 1e9 * self._efficiency.links
        return num_bytes * (num_devices - 1) / num_devices / bandwidth + HOP_SECONDS * min(num_devices, MAX_HOPS)
