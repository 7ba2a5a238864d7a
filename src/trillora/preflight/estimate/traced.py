"""The traced step as one device runs it: values with their share on a device, operations, loops.

A jaxpr speaks of whole arrays. Here every value also knows into how many parts each of its dims is split, as the
partitioner would do it: rows from the batch, heads and inner widths from weights split over the tensor axis. Calls are
written out in place, loops keep their body. What is only another look at a value (a reshape, a slice) is no operation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.extend.core import Literal as JaxprLiteral

Kind = Literal["elementwise", "product", "kernel", "loop", "other"]

VIEWS = frozenset(
    {
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "rev"),
        *("sharding_constraint", "name", "copy", "copy_p", "stop_gradient", "optimization_barrier", "mesh_cast"),
        *("bitcast_convert_type", "reduce_precision", "pad", "split"),
    }
)
# What a compiler does not fuse with the arithmetic around it: its results are arrays in memory.
NOT_FUSED = frozenset(
    {
        *("gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "concatenate", "dynamic_update_slice"),
        *("conv_general_dilated", "ragged_dot", "ragged_dot_general", "argmax", "argmin", "psum", "all_gather"),
        *("cumsum", "cumlogsumexp", "cummax", "cumprod", "reduce_window", "while", "custom_call", "fft"),
    }
)
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")  # the parameter that holds what a call runs
FEW = 4  # elements: not enough to be split over anything
SPLASH, SPLASH_BACKWARD = "splash", "dkv"  # parts of the names of the TPU's attention kernels


@dataclass(eq=False)
class Value:
    """An array: its shape as traced, and into how many parts each dim is split over the devices."""

    shape: tuple[int, ...]
    itemsize: float
    splits: tuple[int, ...]
    gather_over: int = 1  # devices a weight lies split over; a product needs it whole
    source: Value | None = None  # what this is only a look at
    from_nothing: bool = False  # a constant, an iota, random bits: split like whatever it is combined with

    @property
    def num_elements(self) -> float:
        """On one device, where it is whole if it has to be gathered."""
        return math.prod(self.shape) / math.prod(self.splits)

    @property
    def num_bytes(self) -> float:
        return self.num_elements * self.itemsize

    @property
    def says_no_split(self) -> bool:
        """Nor does a single number, such as half of a random key."""
        return self.from_nothing or math.prod(self.shape) <= FEW

    @property
    def origin(self) -> Value:
        return self if self.source is None else self.source.origin


@dataclass(eq=False)
class Operation:
    """One step of a program. `product` has the sizes (batch, rows, inner, columns) of a matrix product on one device;
    `partial_over` devices hold partial sums of the result, which are added up."""

    name: str
    kind: Kind
    inputs: list[Value]
    outputs: list[Value]
    product: tuple[float, float, float, float] | None = None
    partial_over: int = 1
    partial_bytes: float = 0.0  # on each of those devices
    kernel_flops: float = 0.0
    width: int = 0  # of a kernel's heads: how much of a matrix unit its products fill
    body: TracedProgram | None = None
    length: int = 1

    @property
    def is_vector_product(self) -> bool:
        return self.name == "dot_general" and self.product is None

    @property
    def flops(self) -> float:
        return 2 * math.prod(self.product) if self.product else self.kernel_flops


@dataclass(eq=False)
class TracedProgram:
    """Operations in order. Of a loop's body, inputs are constants, carry and slices; outputs carry and slices."""

    inputs: list[Value]
    outputs: list[Value]
    operations: list[Operation]
    num_constants: int = 0
    num_carry: int = 0
    is_body: bool = False

    @property
    def carry_inputs(self) -> list[Value]:
        return self.inputs[self.num_constants : self.num_constants + self.num_carry]


def read_program(
    closed: ClosedJaxpr, inputs: list[Value], num_devices: int, branch_shares: Sequence[float] = ()
) -> TracedProgram:
    """`inputs` are the arguments, flat, with the split they come with. `branch_shares`: how often each branch of a
    conditional with that many is taken, where it is known."""
    operations: list[Operation] = []
    reader = _Reader(num_devices, branch_shares)
    outputs = reader.read(closed.jaxpr, [*_constants(closed), *inputs], operations)
    return TracedProgram(inputs, outputs, operations)


@dataclass
class _Reader:
    num_devices: int
    branch_shares: Sequence[float]

    def read(self, jaxpr: Jaxpr, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """Append what `jaxpr` does to `operations`; its outputs. `inputs` begin with the jaxpr's own constants."""
        known: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def value(atom: Any) -> Value:
            if isinstance(atom, JaxprLiteral):
                return _unsplit(atom.aval, from_nothing=True)
            return known[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [value(atom) for atom in equation.invars], operations)
            known.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Any, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        name, parameters = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(parameters, inputs, operations)
        if name == "while":
            return self._while(parameters, inputs, operations)
        if name == "cond":
            return self._cond(parameters["branches"], inputs[1:], operations)
        if name == "pallas_call":
            return self._kernel(equation, inputs, operations)
        called = next((parameters[key] for key in CALLED if key in parameters), None)
        if called is not None:
            return self._call(equation, called, inputs, operations)
        shapes = [variable.aval for variable in equation.outvars]
        splits = [self._bounded(s) for s in output_splits(equation, inputs)]
        if _is_view(name, shapes, inputs):
            sources = inputs if len(inputs) == len(shapes) else inputs[:1] * len(shapes)
            return [_view(*parts) for parts in zip(shapes, splits, sources, strict=True)]
        from_nothing = all(v.says_no_split for v in inputs)
        outputs = [
            Value(tuple(aval.shape), _itemsize(aval), split, from_nothing=from_nothing)
            for aval, split in zip(shapes, splits, strict=True)
        ]
        operation = Operation(name, _kind(name), inputs, outputs)
        if name == "dot_general":
            _measure_product(operation, parameters["dimension_numbers"])
        elif name == "gather":
            _measure_lookup(operation)
        elif operation.kind == "elementwise":
            _adopt_splits(inputs, outputs)
        operations.append(operation)
        return outputs

    def _cond(self, branches: Sequence[ClosedJaxpr], inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """The branch with the most to multiply stands for all, its kernels shortened to what branches do on average:
        layers of several kinds that share a body differ in how far they look back."""
        read: list[tuple[float, list[Operation], list[Value]]] = []
        for branch in branches:
            inner: list[Operation] = []
            outputs = self.read(branch.jaxpr, [*_constants(branch), *inputs], inner)
            read.append((sum(operation.flops for operation in inner), inner, outputs))
        most, inner, outputs = max(read, key=lambda each: (each[0], len(each[1])))
        if most and len(read) == len(self.branch_shares):
            mean = sum(share * flops for share, (flops, _, _) in zip(self.branch_shares, read, strict=True))
            for operation in inner:
                operation.kernel_flops *= mean / most
        operations += inner
        return outputs

    def _call(self, equation: Any, called: Any, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """Written out in place. Inside a `shard_map` shapes are those of one device already."""
        jaxpr, constants = (called.jaxpr, _constants(called)) if isinstance(called, ClosedJaxpr) else (called, [])
        if equation.primitive.name != "shard_map":
            return self.read(jaxpr, [*constants, *inputs], operations)
        local = [_view(v.aval, (1,) * len(v.aval.shape), i) for v, i in zip(jaxpr.invars, inputs, strict=True)]
        results = self.read(jaxpr, [*constants, *local], operations)
        return [
            _view(outer.aval, _ratio(outer.aval.shape, inner.shape), inner)
            for outer, inner in zip(equation.outvars, results, strict=True)
        ]

    def _scan(self, parameters: dict[str, Any], inputs: list[Value], operations: list[Operation]) -> list[Value]:
        num_constants, num_carry = _scan_counts(parameters)
        body_inputs = [_inner(v) for v in inputs[: num_constants + num_carry]]
        body_inputs += [_slice_of(v) for v in inputs[num_constants + num_carry :]]
        body = self._body(parameters["jaxpr"], body_inputs, num_constants, num_carry)
        length = int(parameters["length"])
        outputs = [Value(v.shape, v.itemsize, v.splits) for v in body.outputs[:num_carry]]
        outputs += [Value((length, *v.shape), v.itemsize, (1, *v.splits)) for v in body.outputs[num_carry:]]
        operations.append(Operation("scan", "loop", inputs, outputs, body=body, length=length))
        return outputs

    def _while(self, parameters: dict[str, Any], inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """How often it runs cannot be seen: once."""
        inputs = inputs[parameters["cond_nconsts"] :]
        num_constants = parameters["body_nconsts"]
        num_carry = len(inputs) - num_constants
        body = self._body(parameters["body_jaxpr"], [_inner(v) for v in inputs], num_constants, num_carry)
        outputs = [Value(v.shape, v.itemsize, v.splits) for v in body.outputs]
        operations.append(Operation("while", "loop", inputs, outputs, body=body))
        return outputs

    def _body(self, closed: ClosedJaxpr, inputs: list[Value], num_constants: int, num_carry: int) -> TracedProgram:
        """A carry may start unsplit, as zeros do, and become split: read again with what it became."""
        carry = inputs[num_constants : num_constants + num_carry]
        while True:
            operations: list[Operation] = []
            outputs = self.read(closed.jaxpr, [*_constants(closed), *inputs], operations)
            grown = [max(v.splits, o.splits, key=math.prod) for v, o in zip(carry, outputs, strict=False)]
            if all(v.splits == splits for v, splits in zip(carry, grown, strict=True)):
                return TracedProgram(inputs, outputs, operations, num_constants, num_carry, is_body=True)
            for v, splits in zip(carry, grown, strict=True):
                v.splits = splits

    def _kernel(self, equation: Any, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """A Pallas kernel: the products in its body, once for every block of its grid that it does not skip."""
        parameters = equation.params
        grid = [g for g in parameters["grid_mapping"].grid if isinstance(g, int)]
        flops = product_flops(parameters["jaxpr"]) * math.prod(grid)
        name = str(parameters.get("name") or parameters.get("name_and_src_info") or "")
        if SPLASH in name and len(grid) >= 3:
            # Blocks of queries by blocks of keys; the backward kernel has its heads in between.
            flops *= causal_share(grid[-3 if SPLASH_BACKWARD in name else -2], grid[-1])
        outputs = [_unsplit(variable.aval) for variable in equation.outvars]
        largest = max(inputs, key=lambda v: v.num_elements)
        width = largest.shape[-1] if SPLASH in name else 0
        operations.append(Operation(name, "kernel", inputs, outputs, kernel_flops=flops, width=width))
        return outputs

    def _bounded(self, splits: tuple[int, ...]) -> tuple[int, ...]:
        """A mesh axis splits one dim only: of two that both want it, the first."""
        bounded, total = [], 1
        for split in splits:
            bounded.append(split if total * split <= self.num_devices else 1)
            total *= bounded[-1]
        return tuple(bounded)


def _scan_counts(parameters: dict[str, Any]) -> tuple[int, int]:
    """Inputs a scan's body only reads, and those it hands on from turn to turn."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carry, _ = parameters["ft_in"].unpack()  # from jax 0.11 on
    return len(constants), len(carry)


def causal_share(num_rows: int, num_columns: int) -> float:
    """Of the blocks of a causal mask, how many are not all hidden; with a window the kernel's grid is narrower."""
    seen = sum(min(row + 1, num_columns) for row in range(num_rows))
    return seen / (num_rows * num_columns)


def product_flops(jaxpr: Jaxpr) -> float:
    """Of all matrix products in a jaxpr and what it calls, with shapes as they stand; of branches, the largest."""
    total = 0.0
    equations: list[Any] = jaxpr.eqns
    for equation in equations:
        parameters = equation.params
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = parameters["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
            total += 2 * math.prod(equation.outvars[0].aval.shape) * inner
        elif equation.primitive.name == "cond":
            total += max(product_flops(branch.jaxpr) for branch in parameters["branches"])
        else:
            length = parameters.get("length", 1)
            inner_jaxprs = [p for p in parameters.values() if isinstance(p, Jaxpr | ClosedJaxpr)]
            total += sum(length * product_flops(p.jaxpr if isinstance(p, ClosedJaxpr) else p) for p in inner_jaxprs)
    return total


def output_splits(equation: Any, inputs: list[Value]) -> list[tuple[int, ...]]:
    """How an operation's results are split, given how its operands are."""
    name, parameters = equation.primitive.name, equation.params
    shapes = [tuple(variable.aval.shape) for variable in equation.outvars]
    first = inputs[0].splits if inputs else ()
    if name == "dot_general":
        return [_product_splits(parameters["dimension_numbers"], *inputs[:2])]
    if name == "sharding_constraint":
        return [_ratio(shapes[0], parameters["sharding"].shard_shape(shapes[0]))]
    if name == "transpose":
        return [tuple(first[d] for d in parameters["permutation"])]
    if name == "reshape":
        return [reshaped_splits(inputs[0].shape, first, shapes[0])]
    if name == "broadcast_in_dim":
        return [_broadcast_splits(parameters["broadcast_dimensions"], inputs[0], shapes[0])]
    if name == "squeeze":
        return [tuple(s for d, s in enumerate(first) if d not in parameters["dimensions"])]
    if name == "gather":
        return [_gather_splits(parameters["dimension_numbers"], inputs[0], inputs[1], shapes[0])]
    if "axes" in parameters and shapes and len(shapes[0]) == len(first) - len(parameters["axes"]):
        return [tuple(s for d, s in enumerate(first) if d not in parameters["axes"])] * len(shapes)
    return [_combined_splits(inputs, shape) for shape in shapes]


def reshaped_splits(old: Sequence[int], splits: Sequence[int], new: Sequence[int]) -> tuple[int, ...]:
    """Dims merged or divided keep their split on the first dim it divides."""
    result = [1] * len(new)
    if math.prod(old) == 0:
        return tuple(result)
    i = j = 0
    while i < len(old) and j < len(new):
        first_i, first_j, left, right = i, j, old[i], new[j]
        while left != right:
            if left < right:
                i += 1
                left *= old[i]
            else:
                j += 1
                right *= new[j]
        i, j = i + 1, j + 1
        split = math.prod(splits[first_i:i])
        place = next((d for d in range(first_j, j) if new[d] % split == 0), None)
        if place is not None:
            result[place] = split
    return tuple(result)


def _product_splits(dimension_numbers: Any, left: Value, right: Value) -> tuple[int, ...]:
    (left_inner, right_inner), (left_batch, right_batch) = dimension_numbers
    batch = [max(left.splits[a], right.splits[b]) for a, b in zip(left_batch, right_batch, strict=True)]
    rows = [s for d, s in enumerate(left.splits) if d not in left_inner and d not in left_batch]
    columns = [s for d, s in enumerate(right.splits) if d not in right_inner and d not in right_batch]
    return (*batch, *rows, *columns)


def _measure_product(operation: Operation, dimension_numbers: Any) -> None:
    """Sizes on one device, and over how many devices the sum is spread. Products of vectors with vectors are sums to
    the compiler: the matrix unit has no part in them."""
    left, right = operation.inputs[:2]
    output = operation.outputs[0]
    (left_inner, right_inner), (left_batch, _) = dimension_numbers
    inner = math.prod(left.shape[d] for d in left_inner)
    spread = math.prod(max(left.splits[a], right.splits[b]) for a, b in zip(left_inner, right_inner, strict=True))
    if spread > 1:
        operation.partial_over, operation.partial_bytes = spread, output.num_bytes
    num_batch = len(left_batch)
    num_left = len(left.shape) - len(left_inner)  # dims of the result that the left operand has
    if math.prod(output.shape[num_batch:]) == 1:
        operation.kind = "other"
        return
    local = [size / split for size, split in zip(output.shape, output.splits, strict=True)]
    rows, columns = math.prod(local[num_batch:num_left]), math.prod(local[num_left:])
    operation.product = (math.prod(local[:num_batch]), rows, inner / spread, columns)


def _measure_lookup(operation: Operation) -> None:
    """Each device looks up all rows of the group in its own part of a split table; the results are then added up."""
    table, output = operation.inputs[0], operation.outputs[0]
    if table.gather_over > 1 and math.prod(output.splits) > 1:
        operation.partial_over = table.gather_over
        operation.partial_bytes = output.num_bytes * table.gather_over


def _broadcast_splits(dims: Sequence[int], value: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    result = [1] * len(shape)
    for d, target in enumerate(dims):
        if value.shape[d] == shape[target]:
            result[target] = value.splits[d]
    return tuple(result)


def _gather_splits(dimension_numbers: Any, table: Value, indices: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Rows of the result are rows of the indices; what is taken from the table keeps the table's split."""
    batch = iter(indices.splits[:-1])
    dropped = (*dimension_numbers.collapsed_slice_dims, *dimension_numbers.operand_batching_dims)
    kept = iter([(table.shape[d], table.splits[d]) for d in range(len(table.shape)) if d not in dropped])
    result = []
    for d, size in enumerate(shape):
        if d in dimension_numbers.offset_dims:
            table_size, split = next(kept)
            result.append(split if table_size == size else 1)
        else:
            result.append(next(batch))
    return tuple(result)


def _combined_splits(inputs: Iterable[Value], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Operands side by side: each dim as split as in the operand that splits it most."""
    result = [1] * len(shape)
    for value in inputs:
        if len(value.shape) == len(shape):
            for d, (size, split) in enumerate(zip(value.shape, value.splits, strict=True)):
                if size == shape[d]:
                    result[d] = max(result[d], split)
    return tuple(result)


def _adopt_splits(inputs: list[Value], outputs: list[Value]) -> None:
    """The partitioner works backwards too: a random mask is split like the rows it is laid over."""
    for value in inputs:
        if value.from_nothing and value.shape == outputs[0].shape:
            value.splits = outputs[0].splits


def _is_view(name: str, shapes: list[Any], inputs: list[Value]) -> bool:
    """A widening is part of whatever reads it; a narrowing is worth keeping in place of what it came from."""
    if name == "convert_element_type":
        return _itemsize(shapes[0]) >= inputs[0].itemsize
    return name in VIEWS


def _kind(name: str) -> Kind:
    if name == "dot_general":
        return "product"
    return "other" if name in NOT_FUSED or name.startswith("reduce_") else "elementwise"


def _view(aval: Any, splits: tuple[int, ...], source: Value) -> Value:
    return Value(
        tuple(aval.shape), _itemsize(aval), splits, source.gather_over, source, from_nothing=source.says_no_split
    )


def _inner(value: Value) -> Value:
    """What a loop's body sees of a value outside."""
    return Value(value.shape, value.itemsize, value.splits, value.gather_over)


def _slice_of(value: Value) -> Value:
    return Value(value.shape[1:], value.itemsize, value.splits[1:], value.gather_over)


def _unsplit(aval: Any, *, from_nothing: bool = False) -> Value:
    shape = tuple(getattr(aval, "shape", ()))
    return Value(shape, _itemsize(aval), (1,) * len(shape), from_nothing=from_nothing)


def _constants(closed: ClosedJaxpr) -> list[Value]:
    return [_unsplit(variable.aval, from_nothing=True) for variable in closed.jaxpr.constvars]


def _ratio(whole: Sequence[int], part: Sequence[int]) -> tuple[int, ...]:
    return tuple(w // p if p else 1 for w, p in zip(whole, part, strict=True))


def _itemsize(aval: Any) -> float:
    """Random keys and tokens of order have no size worth counting."""
    return float(getattr(getattr(aval, "dtype", None), "itemsize", 0))
