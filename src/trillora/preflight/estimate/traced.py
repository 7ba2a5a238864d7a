"""Reads a traced step (a jaxpr) as the program that one device runs: values, operations, loops.

A jaxpr describes whole arrays. Here each value also has `splits`: into how many parts each dim is split over the
devices, as the partitioner would do it. Batches split sequences; weights on the tensor axis split heads and widths.
Example: `jnp.tanh(x @ w) * 2` on 8 devices, with x split by rows and w sharded by fsdp, so gathered before use:

    c:f32[64,128] = dot_general a:f32[64,32] b:f32[32,128]
    d:f32[64,128] = tanh c
    e:f32[64,128] = mul d 2.0

    read_program(jaxpr, [Value((64, 32), 4, splits=(8, 1)), Value((32, 128), 4, splits=(1, 1), gather_over=8)], 8)

    operation    kind         on one device                                    result: splits, bytes on one device
    dot_general  product      (batch 1, 8 rows, inner 32, 128 columns),        (8, 1), 8 * 128 * 4 = 4096
                              2 * 8 * 32 * 128 = 65,536 flops
    tanh         elementwise  no flops counted: fused                          (8, 1), 4096
    mul          elementwise                                                   (8, 1), 4096

Calls are inlined; loops keep their body. Views of a value (a reshape, a slice) are not operations. `estimate.schedule`
then decides which results are in memory: here only the matmul's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxprLiteral
from jax.interpreters import partial_eval

from trillora.engine.kernels.product_sum import KERNEL_NAME
from trillora.engine.mixture.experts import RARE
from trillora.engine.mixture.grouped_product import TILES_NAME
from trillora.engine.quantize import item_bytes
from trillora.preflight.hlo.attention import AttentionWork, Phase

Kind = Literal["elementwise", "product", "kernel", "loop", "other"]

VIEWS = frozenset(
    {
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "rev"),
        *("sharding_constraint", "name", "copy", "copy_p", "stop_gradient", "optimization_barrier", "mesh_cast"),
        *("bitcast_convert_type", "reduce_precision", "pad", "split"),
    }
)
# Not fused with the elementwise operations around it: the results are arrays in memory.
NOT_FUSED = frozenset(
    {
        *("gather", "scatter", "scatter-add", "scatter_add", "sort", "top_k", "concatenate", "dynamic_update_slice"),
        *("conv_general_dilated", "argmax", "argmin", "psum", "all_gather", "reduce_scatter"),
        *("cumsum", "cumlogsumexp", "cummax", "cumprod", "reduce_window", "while", "custom_call", "fft"),
    }
)
CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")  # parameters that hold the body of a call
TILES = re.compile(rf"{TILES_NAME}_(\d+)_\d+_\d+_(\d+)_end")
FEW = 4  # elements; arrays up to this size are never split
SPLASH, SPLASH_BACKWARD = "splash", "dkv"  # parts of the names of the TPU's attention kernels


@dataclass(eq=False)
class Value:
    """An array: its traced shape, and into how many parts each dim is split over the devices."""

    shape: tuple[int, ...]
    itemsize: float
    splits: tuple[int, ...]
    gather_over: int = 1  # devices that a weight is sharded over; it is gathered before a product
    source: Value | None = None  # the value this is a view of
    from_nothing: bool = False  # a constant, an iota, random bits: takes the split of its other operand

    @property
    def num_elements(self) -> float:
        """On one device; a weight that must be gathered counts whole."""
        return math.prod(self.shape) / math.prod(self.splits)

    @property
    def num_bytes(self) -> float:
        return self.num_elements * self.itemsize

    @property
    def says_no_split(self) -> bool:
        """Whether the value does not determine how results are split: also true for single numbers."""
        return self.from_nothing or math.prod(self.shape) <= FEW

    @property
    def origin(self) -> Value:
        return self if self.source is None else self.source.origin


@dataclass(eq=False)
class Operation:
    """One operation of a program. `product` has the sizes (batch, rows, inner, columns) of a matrix product on one
    device. If `partial_over` is above 1, that many devices hold partial sums, which are then reduced."""

    name: str
    kind: Kind
    inputs: list[Value]
    outputs: list[Value]
    product: tuple[float, float, float, float] | None = None
    partial_over: int = 1
    partial_bytes: float = 0.0  # of the partial sums, per device
    sent_over: int = 1  # devices that exchange tokens, and the bytes of all of them together
    sent_bytes: float = 0.0
    kernel_flops: float = 0.0
    attention: AttentionWork | None = None  # of a TPU's attention kernel
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
    """Operations in order. A loop body has constants, carry and slices as inputs, carry and slices as outputs."""

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
    """`inputs` are the flat arguments with their splits. `branch_shares`: how often each branch of a conditional with
    that many branches is taken, if known. What no output depends on is left out, as compilers do."""
    operations: list[Operation] = []
    reader = _Reader(num_devices, branch_shares)
    used, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    outputs = reader.read(used, [*_constants(closed), *inputs], operations)
    return TracedProgram(inputs, outputs, operations)


@dataclass
class _Reader:
    num_devices: int
    branch_shares: Sequence[float]

    def read(self, jaxpr: Jaxpr, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """Append the operations of `jaxpr` and return its outputs. `inputs` begin with the jaxpr's own constants."""
        known: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))

        def value(atom: Any) -> Value:
            if isinstance(atom, JaxprLiteral):
                return _unsplit(atom.aval, from_nothing=True)
            return known[atom]

        for equation in jaxpr.eqns:
            results = self._equation(equation, [value(atom) for atom in equation.invars], operations)
            known.update(zip(equation.outvars, results, strict=True))
        return [value(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: JaxprEqn, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        name, parameters = equation.primitive.name, equation.params
        if name == "scan":
            return self._scan(parameters, inputs, operations)
        if name == "while":
            if RARE in str(equation.source_info.name_stack):
                return [_unsplit(variable.aval) for variable in equation.outvars]
            return self._while(parameters, inputs, operations)
        if name == "cond":
            return self._cond(parameters["branches"], inputs[1:], operations)
        if name == "pallas_call":
            return self._kernel(equation, inputs, operations)
        if parameters.get("name") == KERNEL_NAME:
            return _product_sum(equation, inputs, operations)
        called = next((parameters[key] for key in CALLED if key in parameters), None)
        if called is not None and (tiles := TILES.search(str(equation.source_info.name_stack))):
            return _grouped_kernel(equation, inputs, tiles, operations)
        if called is not None:
            return self._call(equation, called, inputs, operations)
        shapes: list[Any] = [variable.aval for variable in equation.outvars]
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
        elif name == "ragged_dot_general":
            _measure_grouped_product(operation, parameters["ragged_dot_dimension_numbers"])
        elif name == "gather":
            _measure_lookup(operation)
        elif name in ("all_gather", "reduce_scatter"):
            operation.sent_over = parameters["axis_size"]
            operation.sent_bytes = max(inputs[0].num_bytes, outputs[0].num_bytes)
        elif operation.kind == "elementwise":
            _adopt_splits(inputs, outputs)
        operations.append(operation)
        return outputs

    def _cond(self, branches: Sequence[ClosedJaxpr], inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """The branch with the most flops represents all. Its kernels are scaled to the average of the branches: layers
        of several kinds that share a loop body differ in their attention window."""
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
                if operation.attention is not None:
                    operation.attention = operation.attention.scaled(mean / most)
        operations += inner
        return outputs

    def _call(self, equation: JaxprEqn, called: Any, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """Inline the call. Inside a `shard_map`, shapes are already per device."""
        jaxpr, constants = (called.jaxpr, _constants(called)) if isinstance(called, ClosedJaxpr) else (called, [])
        if equation.primitive.name != "shard_map":
            return self.read(jaxpr, [*constants, *inputs], operations)
        local = [_local(variable.aval, given) for variable, given in zip(jaxpr.invars, inputs, strict=True)]
        results = self.read(jaxpr, [*constants, *local], operations)
        outputs: list[Any] = [variable.aval for variable in equation.outvars]
        return [
            _view(outer, _ratio(outer.shape, inner.shape), inner) for outer, inner in zip(outputs, results, strict=True)
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
        """The trip count is unknown: the body counts once."""
        inputs = inputs[parameters["cond_nconsts"] :]
        num_constants = parameters["body_nconsts"]
        num_carry = len(inputs) - num_constants
        body = self._body(parameters["body_jaxpr"], [_inner(v) for v in inputs], num_constants, num_carry)
        outputs = [Value(v.shape, v.itemsize, v.splits) for v in body.outputs]
        operations.append(Operation("while", "loop", inputs, outputs, body=body))
        return outputs

    def _body(self, closed: ClosedJaxpr, inputs: list[Value], num_constants: int, num_carry: int) -> TracedProgram:
        """A carry may start unsplit, for example as zeros, and become split: then the body is read again."""
        carry = inputs[num_constants : num_constants + num_carry]
        while True:
            operations: list[Operation] = []
            outputs = self.read(closed.jaxpr, [*_constants(closed), *inputs], operations)
            grown = [max(v.splits, o.splits, key=math.prod) for v, o in zip(carry, outputs, strict=False)]
            if all(v.splits == splits for v, splits in zip(carry, grown, strict=True)):
                return TracedProgram(inputs, outputs, operations, num_constants, num_carry, is_body=True)
            for v, splits in zip(carry, grown, strict=True):
                v.splits = splits

    def _kernel(self, equation: JaxprEqn, inputs: list[Value], operations: list[Operation]) -> list[Value]:
        """A Pallas kernel: the products in its body, once for every block of its grid that is not skipped."""
        parameters = equation.params
        grid = [g for g in parameters["grid_mapping"].grid if isinstance(g, int)]
        flops = product_flops(parameters["jaxpr"]) * math.prod(grid)
        name = _kernel_name(parameters)
        outputs = [_unsplit(variable.aval) for variable in equation.outvars]
        attention = None
        if SPLASH in name and len(grid) >= 3:
            # The grid is query blocks x key blocks; the backward kernel has the heads in between.
            num_rows = grid[-3 if SPLASH_BACKWARD in name else -2]
            share = causal_share(num_rows, grid[-1])
            flops *= share
            attention = _attention_work(name, inputs, outputs, num_rows, math.prod(grid), share)
        operations.append(Operation(name, "kernel", inputs, outputs, kernel_flops=flops, attention=attention))
        return outputs

    def _bounded(self, splits: tuple[int, ...]) -> tuple[int, ...]:
        """A mesh axis can split only one dim: if the product exceeds the number of devices, the first dims win."""
        bounded, total = [], 1
        for split in splits:
            bounded.append(split if total * split <= self.num_devices else 1)
            total *= bounded[-1]
        return tuple(bounded)


def _kernel_name(parameters: Mapping[str, object]) -> str:
    """Without the block sizes that may follow: they contain the names of other kernels."""
    return str(parameters["name"] or "").partition("_block_")[0]


def _attention_work(
    name: str, inputs: list[Value], outputs: list[Value], num_rows: int, places: int, share: float
) -> AttentionWork:
    """The operands begin with two tables; then queries, keys and values."""
    query, key, value = [v for v in inputs[2:] if len(v.shape) >= 3][:3]
    phase: Phase = "fwd" if "_fwd" in name else "dq" if "_dq" in name else "dkv"
    if phase == "dkv" and any(len(v.shape) == len(query.shape) + 1 for v in outputs):
        phase = "fused"
    width = (key.shape[-1] + value.shape[-1]) / 2
    rows = num_rows * math.prod(query.shape[:-2])
    return AttentionWork(phase, width, query.shape[-2] // num_rows, places * share, rows, places)


def _scan_counts(parameters: dict[str, Any]) -> tuple[int, int]:
    """Number of constants and of carried values of a scan."""
    if "num_consts" in parameters:
        return parameters["num_consts"], parameters["num_carry"]
    constants, carry, _ = parameters["ft_in"].unpack()  # jax 0.11 and later
    return len(constants), len(carry)


def causal_share(num_rows: int, num_columns: int) -> float:
    """Fraction of the blocks of a causal mask that are not fully masked. A window makes the kernel's grid narrower."""
    seen = sum(min(row + 1, num_columns) for row in range(num_rows))
    return seen / (num_rows * num_columns)


def product_flops(jaxpr: Jaxpr) -> float:
    """Flops of all matrix products in a jaxpr and in what it calls, for unsplit shapes; the largest branch counts."""
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


def output_splits(equation: JaxprEqn, inputs: list[Value]) -> list[tuple[int, ...]]:
    """How the results of an operation are split, given the splits of its operands."""
    name, parameters = equation.primitive.name, equation.params
    outputs: list[Any] = [variable.aval for variable in equation.outvars]
    shapes = [tuple(aval.shape) for aval in outputs]
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
    """Merged or divided dims keep their split, on the first new dim that it divides."""
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
    """Set the sizes on one device and the number of devices that hold partial sums. The compiler turns vector-vector
    products into sums, which do not use the matrix unit."""
    left, right = operation.inputs[:2]
    output = operation.outputs[0]
    (left_inner, right_inner), (left_batch, _) = dimension_numbers
    inner = math.prod(left.shape[d] for d in left_inner)
    spread = math.prod(max(left.splits[a], right.splits[b]) for a, b in zip(left_inner, right_inner, strict=True))
    if spread > 1:
        operation.partial_over, operation.partial_bytes = spread, output.num_bytes
    num_batch = len(left_batch)
    num_left = len(left.shape) - len(left_inner)  # dims of the result that come from the left operand
    if math.prod(output.shape[num_batch:]) == 1:
        operation.kind = "other"
        return
    local = [size / split for size, split in zip(output.shape, output.splits, strict=True)]
    rows, columns = math.prod(local[num_batch:num_left]), math.prod(local[num_left:])
    operation.product = (math.prod(local[:num_batch]), rows, inner / spread, columns)


def _measure_grouped_product(operation: Operation, dimension_numbers: Any) -> None:
    """M rows in E groups, each with its own matrix: E products, which have M / E rows on average. The gradient of the
    matrices is a sum over the rows. Each device computes its own tokens, so nothing is split."""
    left, _, sizes = operation.inputs
    (left_inner, _), _ = dimension_numbers.dot_dimension_numbers
    num_groups, inner = sizes.shape[-1], math.prod(left.shape[d] for d in left_inner)
    *_, rows, columns = operation.outputs[0].shape
    if len(operation.outputs[0].shape) == 3:  # [E, I, O]
        operation.product = (num_groups, rows, inner / num_groups, columns)
    else:
        operation.product = (num_groups, rows / num_groups, inner, columns)


def _grouped_kernel(
    equation: JaxprEqn, inputs: list[Value], tiles: re.Match[str], operations: list[Operation]
) -> list[Value]:
    """The TPU's kernel of a grouped product, whose name says how many of its rows have a group on average."""
    rows, weights = (next(v for v in inputs if len(v.shape) == dims) for dims in (2, 3))
    outputs = [_unsplit(variable.aval) for variable in equation.outvars]
    num_groups, num_rows = weights.shape[0], int(tiles[1]) * int(tiles[2])
    sizes = (num_groups, num_rows / num_groups, rows.shape[1], outputs[0].shape[1])
    operations.append(Operation("grouped_product", "product", [rows, weights], outputs, product=sizes))
    return outputs


def _product_sum(equation: JaxprEqn, inputs: list[Value], operations: list[Operation]) -> list[Value]:
    """Pairs of matrices, and perhaps an addend. A sum that nothing uses has no output."""
    outputs = [_unsplit(variable.aval) for variable in equation.outvars]
    if not outputs:
        return []
    (rows, columns), pairs = outputs[0].shape, inputs[: len(inputs) // 2 * 2]
    inner = sum(left.shape[1] for left in pairs[::2])
    operations.append(Operation("product_sum", "product", inputs, outputs, product=(1, rows, inner, columns)))
    return outputs


def _measure_lookup(operation: Operation) -> None:
    """Each device looks up all tokens of the group in its own shard of the table; the results are then summed."""
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
    """Batch dims are split like the indices; dims taken from the table are split like the table."""
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
    """Elementwise: each dim is split as in the operand that splits it most."""
    result = [1] * len(shape)
    for value in inputs:
        if len(value.shape) == len(shape):
            for d, (size, split) in enumerate(zip(value.shape, value.splits, strict=True)):
                if size == shape[d]:
                    result[d] = max(result[d], split)
    return tuple(result)


def _adopt_splits(inputs: list[Value], outputs: list[Value]) -> None:
    """The partitioner also works backwards: a random mask is split like the array it is applied to."""
    for value in inputs:
        if value.from_nothing and value.shape == outputs[0].shape:
            value.splits = outputs[0].splits


def _is_view(name: str, shapes: Sequence[object], inputs: list[Value]) -> bool:
    """A widening conversion is fused into its reader. A narrowing one is stored instead of its operand."""
    if name == "convert_element_type":
        return _itemsize(shapes[0]) >= inputs[0].itemsize
    return name in VIEWS


def _kind(name: str) -> Kind:
    if name in ("dot_general", "ragged_dot_general"):
        return "product"
    return "other" if name in NOT_FUSED or name.startswith("reduce_") else "elementwise"


def _view(aval: Any, splits: tuple[int, ...], source: Value) -> Value:
    return Value(
        tuple(aval.shape), _itemsize(aval), splits, source.gather_over, source, from_nothing=source.says_no_split
    )


def _local(aval: Any, value: Value) -> Value:
    """An argument of a `shard_map`, as one device sees it. A weight that stays split inside is not gathered."""
    origin, num_parts = value.origin, math.prod(value.shape) // max(math.prod(aval.shape), 1)
    if origin.gather_over > 1 and num_parts >= origin.gather_over:
        origin.gather_over, origin.splits = 1, (num_parts, *origin.splits[1:])
    return _view(aval, (1,) * len(aval.shape), value)


def _inner(value: Value) -> Value:
    """An outer value as the body of a loop sees it."""
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
    """0 for random keys, ordering tokens, and arrays in the host's memory."""
    if getattr(getattr(aval, "memory_space", None), "name", "") == "Host":
        return 0.0
    return item_bytes(aval.dtype) if hasattr(aval, "dtype") else 0.0
