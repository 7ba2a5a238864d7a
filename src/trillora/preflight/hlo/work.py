"""Counts the work of an instruction: flops, bytes of HBM traffic, bytes sent over the links. No jax.

For `%y = bf16[2048,4096] dot(%x, %w)` with `x: bf16[2048,64]` and `w: bf16[64,4096]`, all in HBM, on a chip with a
matrix unit of 128:

    flops         2 * 2048 * 64 * 4096
    filled_flops  2 * 2048 * 128 * 4096                           # 64 is padded to the matrix unit
    hbm_bytes     2 * (2048 * 64 + 64 * 4096 + 2048 * 4096)

Speeds of chips are not used here; `simulate` divides this work by them.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from trillora.preflight.hlo.parse import (
    HBM,
    HOST,
    RELABELLING,
    ArrayShape,
    Computation,
    HloProgram,
    Instruction,
    integers,
)

COLLECTIVES = frozenset(
    {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast"}
)
PRODUCTS = frozenset({"dot", "convolution"})
GEMM = re.compile(r"__cublas\$")
TRITON = "__gpu$xla.gpu.triton"  # kernels of `engine.kernels`, except the next
PRODUCT_SUM = "mosaic_gpu_v2"  # our only kernel of this kind: `engine.kernels.product_sum`
CUDNN_ATTENTION = re.compile(r"__cudnn\$fmha")
_SLICES = frozenset({"slice", "dynamic-slice", "gather"})
_NOT_ARITHMETIC = frozenset(
    {"parameter", "constant", "bitcast", "reshape", "tuple", "get-tuple-element", "broadcast", "iota", "custom-call"}
)
_VECTOR = 0  # cache key, where products use the size of the matrix unit
_PASSED_ON = frozenset({"tuple", "custom-call", *COLLECTIVES})  # inside a fusion: buffers of a running collective


Place = tuple[Computation, Instruction]  # an instruction and its computation


@dataclass(frozen=True)
class Transfer:
    """A collective, from the point of view of one device."""

    link_bytes: float  # sent by the device
    num_devices: int  # in the group
    torus_dims: int | None  # used at once, if the compiler states it
    one_way: bool  # sends to one neighbor only; the other direction stays free
    is_piece: bool  # part of a collective that was started earlier and runs in parallel with a product


@dataclass(frozen=True)
class Work:
    """Counts the work of the instructions of one program."""

    program: HloProgram
    num_devices: int
    matrix_unit: int = 1
    on_gpu: bool = False  # then every memory space except the host's is HBM
    _counts: dict[tuple[str, int], float] = field(default_factory=dict, repr=False)  # of computations, by matrix unit

    # Arithmetic

    def flops(self, computation: Computation, instruction: Instruction) -> float:
        """Mathematical flops of the products."""
        return self._product_flops(computation, instruction, unit=1)

    def filled_flops(self, computation: Computation, instruction: Instruction) -> float:
        """Flops with the dims of products padded to whole matrix units."""
        return self._product_flops(computation, instruction, unit=self.matrix_unit)

    def _product_flops(self, computation: Computation, instruction: Instruction, unit: int) -> float:
        if instruction.opcode in PRODUCTS:
            return _product_flops(computation, instruction, unit)
        if instruction.opcode == "custom-call" and GEMM.match(target(instruction)):
            return _gemm_flops(computation, instruction, unit)
        if instruction.opcode == "custom-call" and target(instruction) == PRODUCT_SUM:
            return _sum_flops(computation, instruction, unit)
        inner = self.program.called(instruction) if instruction.opcode == "fusion" else None
        if inner is None:
            return 0.0
        if (inner.name, unit) not in self._counts:
            self._counts[inner.name, unit] = sum(self._product_flops(inner, i, unit) for i in inner.instructions)
        return self._counts[inner.name, unit]

    def operand_bits(self, computation: Computation, instruction: Instruction) -> int:
        """Bits of the widest operand of the products; 0 if there are none."""
        if instruction.opcode in PRODUCTS or (instruction.opcode == "custom-call" and GEMM.match(target(instruction))):
            operands = (computation.operand(instruction, index) for index in (0, 1))
            return max((operand.shapes[0].bits for operand in operands if operand is not None), default=0)
        inner = self.program.called(instruction) if instruction.opcode == "fusion" else None
        return max((self.operand_bits(inner, i) for i in inner.instructions), default=0) if inner is not None else 0

    def vector_operations(self, computation: Computation, instruction: Instruction) -> float:
        """Elements processed by the vector unit, counted once per arithmetic instruction."""
        opcode = instruction.opcode
        inner = self.program.called(instruction) if opcode == "fusion" else None
        if inner is not None:
            if _is_relabelling(instruction, inner):
                return 0.0
            if (inner.name, _VECTOR) not in self._counts:
                counts = [self.vector_operations(inner, i) for i in inner.instructions]
                self._counts[inner.name, _VECTOR] = sum(counts)
            return self._counts[inner.name, _VECTOR]
        if opcode in _NOT_ARITHMETIC or opcode in PRODUCTS or opcode in COLLECTIVES:
            return 0.0
        place = {"dynamic-update-slice": 1, "scatter": 2, "reduce": 0}.get(opcode)
        counted = instruction if place is None else computation.operand(instruction, place)
        return float(sum(math.prod(shape.dims) for shape in counted.shapes)) if counted is not None else 0.0

    # Memory

    def hbm_bytes(self, computation: Computation, instruction: Instruction) -> float:
        """Bytes read from and written to HBM. On-chip arrays count nothing."""
        inner = self.program.called(instruction) if instruction.opcode == "fusion" else None
        if inner is not None:
            return self._fusion_bytes(computation, instruction, inner)
        if instruction.opcode == "dynamic-update-slice":  # in place
            return 2 * self._operand_bytes(computation, instruction, 1)
        if instruction.opcode == "scatter":
            return 2 * self._operand_bytes(computation, instruction, 2)
        written = sum(self.in_hbm(shape) for shape in _results(instruction))
        if instruction.opcode in _SLICES:
            return 2 * written
        return written + sum(self._operand_bytes(computation, instruction, k) for k in range(len(instruction.operands)))

    def in_hbm(self, shape: ArrayShape) -> float:
        """Bytes of an array if it is in HBM, else 0."""
        here = shape.memory_space != HOST if self.on_gpu else shape.memory_space == HBM
        return shape.num_bytes if here else 0.0

    def _operand_bytes(self, computation: Computation, instruction: Instruction, index: int) -> float:
        operand = computation.operand(instruction, index)
        if operand is None or operand.type_text.startswith("("):
            return 0.0
        return sum(self.in_hbm(shape) for shape in operand.shapes)

    def _fusion_bytes(self, computation: Computation, fusion: Instruction, inner: Computation) -> float:
        read = 0.0
        for index, parameter in inner.parameters.items():
            if whole := self._operand_bytes(computation, fusion, index):
                read += self._bytes_read(inner, parameter.name, whole)
        outputs = inner.root.operands if inner.root.opcode == "tuple" else (inner.root.name,)
        pairs = zip(outputs, fusion.shapes, strict=False)
        written = sum(self._bytes_written(inner, name, self.in_hbm(shape)) for name, shape in pairs)
        return read + written

    def _bytes_read(self, computation: Computation, name: str, whole: float) -> float:
        """Bytes read of a value inside a fusion: the slices taken from it, or all of it."""
        if name == computation.root.name:  # result of an inner fusion, used by the outer one
            return whole
        total = 0.0
        for user in computation.users.get(name, ()):
            first = user.operands[0] == name
            if user.opcode in _SLICES:
                total += user.shapes[0].num_bytes if first else 0.0
            elif user.opcode in _PASSED_ON or (user.opcode in ("dynamic-update-slice", "scatter") and first):
                continue
            elif user.opcode in ("bitcast", "reshape", "copy", "convert"):
                total += self._bytes_read(computation, user.name, whole)
            elif user.opcode == "fusion" and (inner := self.program.called(user)) is not None:
                places = [index for index, operand in enumerate(user.operands) if operand == name]
                if _is_relabelling(user, inner):
                    total += self._bytes_read(computation, user.name, whole)
                else:
                    total += sum(self._bytes_read(inner, inner.parameters[place].name, whole) for place in places)
            else:
                return whole
        return min(total, whole)

    def _bytes_written(self, computation: Computation, name: str, whole: float) -> float:
        """Bytes written of a fusion's result: only the slice if updated in place, nothing if passed through."""
        origin = computation.origin(name, RELABELLING)
        if origin is None or whole == 0.0:
            return whole
        if origin.opcode == "fusion" and (inner := self.program.called(origin)) is not None:
            return self._bytes_written(inner, inner.root.name, whole) if inner.root.opcode != "tuple" else whole
        if origin.opcode in ("dynamic-update-slice", "scatter"):
            update = computation.operand(origin, 1 if origin.opcode == "dynamic-update-slice" else 2)
            return min(whole, update.shapes[0].num_bytes) if update is not None else whole
        return 0.0 if origin.opcode == "parameter" or origin.opcode in COLLECTIVES else whole

    def copied_bytes(self, start: Instruction) -> float:
        """HBM traffic of an asynchronous copy or slice: once for each side that is in HBM."""
        sides = start.shapes[:2]
        moved = min(shape.num_bytes for shape in sides)
        return moved * sum(self.in_hbm(shape) > 0 for shape in sides)

    # Links

    def collective_of(self, computation: Computation, instruction: Instruction) -> Place | None:
        """The collective that an instruction is or contains."""
        if instruction.opcode.removesuffix("-start") in COLLECTIVES:
            return computation, instruction
        inner = self.program.called(instruction, "calls", "to_apply")
        if inner is None or instruction.opcode.removesuffix("-start") not in ("fusion", "async", "call"):
            return None
        found = (self.collective_of(inner, i) for i in inner.instructions)
        return next(filter(None, found), None)

    def transfer(self, computation: Computation, instruction: Instruction) -> Transfer | None:
        """What the collective in an instruction sends, using rings: a device forwards all parts but one."""
        place = self.collective_of(computation, instruction)
        if place is None:
            return None
        home, collective = place
        kind = collective.opcode.removesuffix("-start")
        num_devices = 2 if kind == "collective-permute" else group_size(collective, self.num_devices)
        operands = [home.operand(collective, k) for k in range(len(collective.operands))]
        local = sum(shape.num_bytes for operand in operands if operand is not None for shape in operand.shapes)
        others = (num_devices - 1) / num_devices
        if kind == "all-gather":
            sent = local * (num_devices - 1)
        elif kind == "all-reduce":  # a reduce-scatter, then an all-gather, unless only a part is kept
            sent = local * others * (1 if "scatter" in (instruction.attribute("calls") or "") else 2)
        elif kind == "all-to-all":  # a part travels a quarter of the ring on average
            sent = local * max(others, num_devices / 4)
        elif kind == "collective-permute":
            sent = local
        else:
            sent = local * others
        return Transfer(
            link_bytes=sent,
            num_devices=num_devices,
            torus_dims=_stated_torus_dims(instruction) or _stated_torus_dims(collective),
            one_way=kind == "collective-permute" or num_devices == 2,
            is_piece=collective is not instruction and "async_collective_fusion_config" in collective.attributes,
        )


def target(custom_call: Instruction) -> str:
    found = re.search(r"custom_call_target=\"([^\"]*)\"", custom_call.attributes)
    return found[1] if found else ""


def group_size(collective: Instruction, num_devices: int) -> int:
    """Number of devices in a group of the collective, in each notation that compilers use."""
    text = collective.attributes
    if listed := re.search(r"replica_groups=\{\{([\d,]+)\}", text):
        return len(integers(listed[1]))
    if shaped := re.search(r"replica_groups=\[\d+,(\d+)\]", text):
        return int(shaped[1])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", text):
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        return math.prod(sizes[axis] for axis in re.findall(r"'(\w+)'", named[2]))
    return num_devices


def _stated_torus_dims(instruction: Instruction) -> int | None:
    """The compiler states its algorithm: rings with one phase per dim, or an emitter named after the dims."""
    stated = re.search(r"\bphases:(\d)|\"emitter\":\"(\d)DAllGather", instruction.attributes)
    return int(stated[1] or stated[2]) if stated else None


def _is_relabelling(fusion: Instruction, inner: Computation) -> bool:
    """Whether a fusion inside another one only gives its operand another tiling, in place. 8-bit weights of all layers
    get one before a layer's are sliced from them."""
    is_in_place = "output_to_operand_aliasing" in fusion.attributes
    return is_in_place and len(inner.parameters) == 1 and inner.origin(inner.root.name) is inner.parameters[0]


def _results(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """Result shapes, without the scratch space that GPU libraries return in addition."""
    if instruction.opcode == "custom-call" and target(instruction).startswith("__cu"):
        return tuple(shape for shape in instruction.shapes if shape.dtype not in ("s8", "u8"))
    return instruction.shapes


# Products


def _product_flops(computation: Computation, product: Instruction, unit: int) -> float:
    left, right = computation.operand(product, 0), computation.operand(product, 1)
    if left is None or right is None:
        return 0.0
    if product.opcode == "dot":
        contracted = integers(product.braced("lhs_contracting_dims") or "")
        return _dot_flops(left.shapes[0].dims, product.shapes[0].dims, contracted, unit)
    return _convolution_flops(left.shapes[0].dims, right.shapes[0].dims, product, unit)


def _gemm_flops(computation: Computation, call: Instruction, unit: int) -> float:
    left = computation.operand(call, 0)
    contracted = re.search(r"\"lhs_contracting_dimensions\":\[([^\]]*)\]", call.attributes)
    if left is None or contracted is None:
        return 0.0
    return _dot_flops(left.shapes[0].dims, call.shapes[0].dims, integers(contracted[1]), unit)


def _sum_flops(computation: Computation, call: Instruction, unit: int) -> float:
    """The operands are the left matrices, the right ones, and perhaps an addend."""
    lefts = [computation.operand(call, index) for index in range(len(call.operands) // 2)]
    out = call.shapes[0].dims
    return sum(_dot_flops(left.shapes[0].dims, out, (1,), unit) for left in lefts if left is not None)


def _dot_flops(left: tuple[int, ...], out: tuple[int, ...], contracted: tuple[int, ...], unit: int) -> float:
    inner, outer = math.prod(left[dim] for dim in contracted), out[-1] if out else 1
    return 2.0 * math.prod(out) / outer * _filled(outer, unit) * _filled(inner, unit)


def _filled(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _convolution_flops(left: tuple[int, ...], right: tuple[int, ...], product: Instruction, unit: int) -> float:
    """The TPU compiler writes every product as a convolution. A batch of products becomes a spatial dim whose window is
    almost entirely padding, so only positions on real elements count."""
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", product.attributes)
    if labels is None:
        return 0.0
    left_labels, right_labels, out_labels = labels.groups()
    out = product.shapes[0].dims
    inner, outer = right[right_labels.index("i")], right[right_labels.index("o")]
    flops = 2.0 * math.prod(out) * _filled(inner, unit) * _filled(outer, unit) / outer
    for label, window in _windows(product):
        num_out = out[out_labels.index(label)]
        flops *= _real_positions(window, left[left_labels.index(label)], num_out) / num_out
    return flops


@dataclass(frozen=True)
class _Window:
    """The window of a convolution in one spatial dim."""

    size: int
    stride: int
    left_dilation: int
    right_dilation: int
    low_padding: int


@functools.cache
def _real_positions(window: _Window, num_in: int, num_out: int) -> int:
    """How many window positions, over all outputs, fall on an element that is not padding."""
    end = (num_in - 1) * window.left_dilation + 1
    count = 0
    for tap in range(window.size):
        first = tap * window.right_dilation - window.low_padding
        skipped = max(0, -(first // window.stride))
        positions = range(first + skipped * window.stride, min(first + num_out * window.stride, end), window.stride)
        dilation = window.left_dilation
        count += len(positions) if dilation == 1 else sum(position % dilation == 0 for position in positions)
    return count


def _windows(product: Instruction) -> Iterator[tuple[str, _Window]]:
    """The window of each spatial dim, by its label."""
    options = dict(part.split("=") for part in (product.braced("window") or "").split())

    def option(key: str, dim: int, default: int) -> int:
        return int(options[key].split("x")[dim].split("_")[0]) if key in options else default

    for dim in range(len(options["size"].split("x")) if "size" in options else 0):
        yield (
            str(dim),
            _Window(
                size=option("size", dim, 1),
                stride=option("stride", dim, 1),
                left_dilation=option("lhs_dilate", dim, 1),
                right_dilation=option("rhs_dilate", dim, 1),
                low_padding=option("pad", dim, 0),
            ),
        )
