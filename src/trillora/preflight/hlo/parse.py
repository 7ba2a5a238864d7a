"""Parses scheduled HLO, the text of a compiled program, into computations and instructions. No jax.

The text comes from `compiled.as_text()` or from the compiler's dump, for TPU or GPU:

    ENTRY %main (x: bf16[100,4096]) -> bf16[100,4096] {
      %x = bf16[100,4096]{1,0:T(8,128)(2,1)} parameter(0)
      ROOT %y = bf16[100,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%x), kind=kLoop, calls=%twice
    }

    parse(text).entry.root  ->  Instruction(name="y", opcode="fusion", operands=("x",), attributes=", kind=kLoop, ...")
    .shapes                 ->  (ArrayShape("bf16", (100, 4096), minor_to_major=(1, 0), tile=(8, 128), memory_space=1),)
    .shapes[0].num_bytes    ->  104 * 4096 * 2: 100 is padded to whole tiles of 8; S(1) is on-chip memory

It also finds the trip counts of loops. `work` counts the work of an instruction, `simulate` the time of a program.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field

HBM, HOST = 0, 5  # memory spaces in a layout; all others are on-chip

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_INSTRUCTION = re.compile(r"  +(ROOT )?%?([\w.\-]+) = (?=\S)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{\s*$")
_INDEX_COMMENT = re.compile(r"/\*index=\d+\*/")
_BITS = {"pred": 8, "token": 0, "opaque": 0}
RELABELLING = frozenset({"bitcast", "reshape"})  # same bytes, another name
_SAME_VALUE = RELABELLING | {"copy", "convert", "copy-start", "copy-done"}


@dataclass(frozen=True)
class ArrayShape:
    """Type and memory layout of one array."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tile: tuple[int, ...] = ()  # minor dims are padded to whole tiles
    memory_space: int = HBM

    @functools.cached_property
    def num_bytes(self) -> float:
        """Size with tile padding."""
        dims = list(self.dims)
        if len(self.minor_to_major) == len(dims):
            for dim, tile in zip(self.minor_to_major, reversed(self.tile), strict=False):
                dims[dim] = -(-dims[dim] // tile) * tile
        return math.prod(dims) * self.bits / 8

    @property
    def bits(self) -> int:
        """Bits per element: the first number in the type's name, as in bf16 or f8e4m3fn."""
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        number = re.search(r"\d+", self.dtype)
        return int(number[0]) if number else 0


@functools.cache
def _parse_shapes(text: str) -> tuple[ArrayShape, ...]:
    return tuple(_parse_shape(*match.groups(default="")) for match in _SHAPE.finditer(text))


def _parse_shape(dtype: str, dims: str, layout: str) -> ArrayShape:
    order, _, properties = layout.partition(":")
    tile = re.search(r"T\(([\d,]+)\)", properties)
    space = re.search(r"S\((\d+)\)", properties)
    return ArrayShape(
        dtype=dtype,
        dims=integers(dims),
        minor_to_major=integers(order),
        tile=integers(tile[1]) if tile else (),
        memory_space=int(space[1]) if space else HBM,
    )


def integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    type_text: str
    operands: tuple[str, ...]
    literal: str  # text in the parentheses of a constant or parameter
    attributes: str  # everything after the operands
    is_root: bool

    @property
    def shapes(self) -> tuple[ArrayShape, ...]:
        """Shapes of the result, or of its elements if it is a tuple."""
        return _parse_shapes(self.type_text)

    def attribute(self, key: str) -> str | None:
        """The word after `key=`, such as the name of a called computation."""
        found = re.search(rf"\b{key}=%?\"?([\w.\-$]+)", self.attributes)
        return found[1] if found else None

    def braced(self, key: str) -> str | None:
        """The text inside `key={…}`."""
        found = re.search(rf"\b{key}=\{{([^{{}}]*)\}}", self.attributes)
        return found[1] if found else None

    def config_number(self, key: str) -> int | None:
        """A number of the backend configuration."""
        found = re.search(rf"\"{key}\\?\":\s*\"?(\d+)", self.attributes)
        return int(found[1]) if found else None


@dataclass
class Computation:
    """Instructions in execution order."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    by_name: dict[str, Instruction] = field(default_factory=dict)

    def add(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        self.by_name[instruction.name] = instruction

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that read each instruction, by name."""
        users = defaultdict(list)
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                users[name].append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

    @functools.cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    def operand(self, instruction: Instruction, index: int) -> Instruction | None:
        if index >= len(instruction.operands):
            return None
        return self.by_name.get(instruction.operands[index])

    def origin(self, name: str, through: frozenset[str] = _SAME_VALUE) -> Instruction | None:
        """The instruction that computed a value, skipping instructions that only move or relabel it."""
        instruction = self.by_name.get(name)
        while instruction is not None and instruction.opcode in through:
            instruction = self.operand(instruction, 0)
        return instruction


@dataclass(frozen=True)
class HloProgram:
    computations: dict[str, Computation]
    entry: Computation

    def called(self, instruction: Instruction, *keys: str) -> Computation | None:
        """The computation an instruction calls, from the first of these attributes it has; default `calls`."""
        names = (instruction.attribute(key) for key in keys or ("calls",))
        return self.computations.get(next(filter(None, names), ""))


def parse(text: str) -> HloProgram:
    """Parses the text of a program. A line that does not start an instruction continues the previous one: attributes of
    kernels span several lines."""
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    current: Computation | None = None
    pending: list[str] = []

    def flush() -> None:
        if current is not None and pending:
            instruction = _parse_instruction("\n".join(pending))
            for name in instruction.operands:
                _add_element(current, name)
            current.add(instruction)
        pending.clear()

    for line in _INDEX_COMMENT.sub("", text).splitlines():
        if _INSTRUCTION.match(line):
            flush()
            pending.append(line)
        elif header := _COMPUTATION.match(line):
            flush()
            current = computations[header[2]] = Computation(header[2])
            entry = current if header[1] else entry
        elif pending:
            pending.append(line)
    flush()
    if entry is None:
        raise ValueError("no ENTRY computation: the text is not the HLO of a compiled program")
    return HloProgram(computations, entry)


def _parse_instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    assert head is not None
    start = head.end()
    type_end = _closing(line, start) + 1 if line[start] == "(" else line.index(" ", start)
    bracket = line.index("(", type_end)
    opcode = line[type_end:bracket].strip()
    end = _closing(line, bracket)
    inside = line[bracket + 1 : end]
    has_literal = opcode in ("constant", "parameter")
    return Instruction(
        name=head[2],
        opcode=opcode,
        type_text=line[start:type_end],
        operands=() if has_literal else _operand_names(inside),
        literal=inside if has_literal else "",
        attributes=line[end + 1 :],
        is_root=head[1] is not None,
    )


def _add_element(computation: Computation, name: str) -> None:
    """Newer compilers write `tuple#1` instead of a get-tuple-element instruction: add that instruction."""
    source_name, mark, index = name.rpartition("#")
    if not mark or name in computation.by_name:
        return
    _add_element(computation, source_name)
    source = computation.by_name.get(source_name)
    element = _elements(source.type_text)[int(index)] if source is not None else ""
    attributes = f", index={index}"
    computation.add(Instruction(name, "get-tuple-element", element, (source_name,), "", attributes, False))


def _elements(type_text: str) -> list[str]:
    """The element types of a tuple type, as text."""
    elements, depth, start = [], 0, 1
    for match in re.compile(r"[][(){},]").finditer(type_text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        if (match[0] == "," and depth == 1) or depth == 0:
            elements.append(type_text[start : match.start()].strip())
            start = match.end()
    return elements


def _operand_names(text: str) -> tuple[str, ...]:
    """Operand names; each may have its type in front."""
    if "%" in text:
        return tuple(re.findall(r"%([\w.\-]+(?:#\d+)*)", text))
    return tuple(part.split()[-1] for part in text.split(",") if part.strip())


def _closing(text: str, start: int) -> int:
    """Position of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def trip_count(program: HloProgram, caller: Computation, loop: Instruction) -> int | None:
    """Trip count of a loop: as stated by the compiler, else computed from its counter; None if that fails."""
    stated = re.search(r"\"known_trip_count\":\{\"n\":\"(\d+)\"", loop.attributes)
    if stated:
        return int(stated[1])
    condition, body = program.called(loop, "condition"), program.called(loop, "body")
    if condition is None or body is None:
        return None
    initial = caller.origin(loop.operands[0])

    def initial_value(index: int) -> int | None:
        if initial is None or initial.opcode != "tuple" or index >= len(initial.operands):
            return None
        return _constant(caller, initial.operands[index])

    counter = limit = None
    for name in condition.root.operands:
        index, value = _carried_index(condition, name), _constant(condition, name)
        if value is not None:
            limit = value
        elif index is not None and counter is None:
            counter = index
        elif index is not None:
            limit = initial_value(index)  # loop-invariant
    if limit is None and condition.root.opcode == "fusion":
        limit = _largest_constant(program.called(condition.root))
    if limit is None or counter is None:
        return None
    begin = initial_value(counter) or 0
    including = 1 if condition.root.attribute("direction") == "LE" else 0
    return max(1, -(-(limit + including - begin) // _increment(body, counter)))


def _constant(computation: Computation, name: str) -> int | None:
    origin = computation.origin(name)
    if origin is None or origin.opcode != "constant" or not re.fullmatch(r"-?\d+", origin.literal):
        return None
    return int(origin.literal)


def _carried_index(computation: Computation, name: str) -> int | None:
    """The index in the loop's state, if this value is one of its elements."""
    origin = computation.origin(name)
    if origin is None or origin.opcode != "get-tuple-element":
        return None
    source = computation.operand(origin, 0)
    return int(origin.attribute("index") or 0) if source is not None and source.opcode == "parameter" else None


def _largest_constant(computation: Computation | None) -> int | None:
    """The limit inside a fused comparison."""
    if computation is None:
        return None
    values = [_constant(computation, i.name) for i in computation.instructions if i.opcode == "constant"]
    return max((value for value in values if value is not None), default=None)


def _increment(body: Computation, counter: int) -> int:
    """What an iteration adds to the counter."""
    if body.root.opcode != "tuple" or counter >= len(body.root.operands):
        return 1
    addition = body.origin(body.root.operands[counter])
    if addition is None or addition.opcode != "add":
        return 1
    return next((value for value in (_constant(body, name) for name in addition.operands) if value), 1)
