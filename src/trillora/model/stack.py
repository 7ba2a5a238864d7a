"""Runs the decoder layers as scans, so that equal layers are traced and compiled only once.

Example: a first layer that differs from the other three, and a model that repeats two kinds of layers:

    >>> find_segments(["dense", "moe", "moe", "moe"])
    [RepeatedLayers(start=0, period=1, repetitions=1), RepeatedLayers(start=1, period=1, repetitions=3)]
    >>> find_segments(["local", "local", "global"] * 4)
    [RepeatedLayers(start=0, period=3, repetitions=4)]

In the first model, layer 0 runs by itself with weights such as `model.layers.0.self_attn.q_proj.weight` [E, D]. Layers
1 to 3 are one `jax.lax.scan` over stacked weights: `model.layers.1:4:1.self_attn.q_proj.weight` [3, E, D]. In the
second model the scan body is three layers, and the scan runs it four times.

transformers' own code calls the layers one by one, in a Python loop. To get a scan out of it:

1. Every layer's `forward` is replaced by a recorder (`_record`). Called for layer i, it stores the arguments and
   returns the hidden state unchanged.
2. Called for the last layer, it runs all the layers, segment by segment (`_run`), and returns the real hidden state.
3. In a scan, arguments that are equal in all repetitions are closed over. Tensors that differ are stacked and scanned
   like the weights, and mask rules that differ become a `RuleChoice`. If the arguments differ in any other way
   (`CannotScan`), the layers of the segment run one by one.

If a layer is called with more than the hidden state of the layer before it, such as the keys that an indexer chose
there, the model runs again, and every layer runs when it is called (`_run_linked`).

There are no lists of model names: two layers share a body if their signatures (`layer_signature`) are equal.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.utils._pytree as torch_tree
from torchax import interop

from trillora.devices.mesh import split_rows
from trillora.engine.attention import MaskRule, RuleChoice
from trillora.model.lora import joined_layers
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS, environment
from trillora.model.remat import Remat, checkpointed, policy_number, recomputed_together
from trillora.model.trace import Trace, current

# Attributes that do not change what a layer computes: its index, and flags that are always the same here.
_INDEX_ATTRIBUTES = frozenset({"layer_idx", "layer_id", "layer_number", "block_idx", "idx", "training"})
# Attributes that give the attention window, which the layer's mask contains too. Layers that only pass them on to
# attention can share a body; the mask is then selected at run time.
_WINDOW_ATTRIBUTES = frozenset({"is_sliding", "sliding_window", "layer_type", "attention_type", "attention_chunk_size"})
_PASSED_ON = "sliding_window=self.sliding_window"
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # addresses of functions in the text of a jaxpr
_MAX_PERIOD = 16


@dataclass(frozen=True)
class RepeatedLayers:
    """`period` consecutive layers are one body, which runs `repetitions` times, beginning with layer `start`."""

    start: int
    period: int
    repetitions: int


class CannotScan(Exception):
    """These layers must run one by one; the message gives the reason."""


@dataclass(frozen=True)
class _Varying:
    """A recorded argument that is not the same in every repetition.

    If repetitions 0 to 3 get the mask rules full, window, full, window: values = [full, window], which = [0, 1, 0, 1].
    """

    slot: int  # index of the layer in the period
    at: int  # index of the argument among the leaves of a call
    values: list[Any]  # the distinct arrays or mask rules
    which: list[int]  # for each repetition, the index of its value

    @property
    def _is_scanned(self) -> bool:
        return len(self.values) == len(self.which) and isinstance(self.values[0], jax.Array)

    def per_repetition(self) -> jax.Array:
        """The array to scan over: the values themselves if all are distinct arrays, else their indices."""
        return jnp.stack(self.values) if self._is_scanned else jnp.asarray(self.which, jnp.int32)

    def pick(self, scanned: jax.Array) -> Any:
        if self._is_scanned:
            return interop.torch_view(scanned)
        if isinstance(self.values[0], MaskRule):
            return RuleChoice(tuple(self.values), scanned)
        return interop.torch_view(jax.lax.select_n(scanned, *self.values))


def find_segments(signatures: Sequence[object]) -> list[RepeatedLayers]:
    """Splits the layers into segments so that as few layers as possible are traced, by dynamic programming: `best[n]`
    is the cheapest split of the first n layers."""
    best: list[tuple[float, list[RepeatedLayers]]] = [(0.0, [])]
    for end in range(1, len(signatures) + 1):
        cost, segments = best[end - 1]
        choice = (cost + 1, [*segments, RepeatedLayers(end - 1, 1, 1)])
        for period in range(1, min(_MAX_PERIOD, end // 2) + 1):
            repetitions = 1
            last = signatures[end - period : end]
            while signatures[max(end - (repetitions + 1) * period, 0) : end - repetitions * period] == last:
                repetitions += 1
                start = end - repetitions * period
                cost = best[start][0] + period + 0.5  # a loop costs a little more than its body
                if cost < choice[0]:
                    choice = (cost, [*best[start][1], RepeatedLayers(start, period, repetitions)])
                if start < period:
                    break
        best.append(choice)
    return best[-1][1]


def layer_signature(layer: torch.nn.Module) -> tuple[Any, ...]:
    """Two layers with equal signatures compute the same function of their weights, inputs and masks."""

    def counts(module: torch.nn.Module, key: str, value: object) -> bool:
        if key.startswith("_") or key in _INDEX_ATTRIBUTES or not _is_plain(value):
            return False
        return key not in _WINDOW_ATTRIBUTES or _uses(type(module), key)

    modules = [
        (
            name,
            type(module).__qualname__,
            tuple(sorted((key, repr(value)) for key, value in module.__dict__.items() if counts(module, key, value))),
        )
        for name, module in layer.named_modules()
    ]
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    return (*modules, *((name, tuple(t.shape), str(t.dtype)) for name, t in tensors))


def _window_attributes(layer: torch.nn.Module) -> tuple[Any, ...]:
    return tuple(
        (name, key, repr(value))
        for name, module in layer.named_modules()
        for key, value in sorted(vars(module).items())
        if key in _WINDOW_ATTRIBUTES
    )


def _within(rule: MaskRule, num_tokens: int) -> MaskRule:
    """The rule for sequences of this length: a window that covers the whole sequence is dropped."""
    if rule.window is None or rule.window < num_tokens:
        return rule
    return dataclasses.replace(rule, window=None)


def _distinct(values: Sequence[object], same: Callable[[Any, Any], bool]) -> tuple[list[Any], list[int]]:
    """The distinct values, and for each value its index among them: [a, b, a] -> [a, b], [0, 1, 0]."""
    distinct: list[Any] = []
    which = []
    for value in values:
        number = next((n for n, other in enumerate(distinct) if same(value, other)), len(distinct))
        if number == len(distinct):
            distinct.append(value)
        which.append(number)
    return distinct, which


def _uses(cls: type, attribute: str) -> bool:
    """Whether the class does anything with the attribute other than pass it to attention."""
    functions = [
        function
        for ancestor in cls.__mro__[: cls.__mro__.index(torch.nn.Module)]
        for name, function in vars(ancestor).items()
        if name != "__init__" and inspect.isfunction(function)
    ]
    try:
        return any(f"self.{attribute}" in inspect.getsource(f).replace(_PASSED_ON, "") for f in functions)
    except OSError:
        return True


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(v) for v in value)
    if isinstance(value, dict):
        return all(_is_plain(v) for v in value.values())
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def decoder_layers(model: torch.nn.Module) -> tuple[str, list[torch.nn.Module]] | None:
    """The name of the list of decoder layers, and the layers: the outermost ModuleList with num_hidden_layers items."""
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    # Skip vision and audio towers, and lists of embeddings.
    found = [(n, m) for n, m in found if not any(word in n for word in ("vision", "audio", "image", "embed", "altup"))]
    if not found:
        return None
    name, layers = min(found, key=lambda item: (item[0].count("."), not item[0].endswith("layers")))
    return name, list(layers)


class NotKept:
    """A placeholder for the other outputs of a layer, such as router logits. Passing it to a layer is an error."""


class LinkedLayers(Exception):
    """A layer uses more than the hidden state of the layer before it, so recorded calls are not enough."""


class LayerStack:
    """The decoder layers of a model: records their calls and runs them in segments.

    After `LinkedLayers`, the model has to run again with `linked` set: each layer then runs when it is called.
    """

    linked = False

    def __init__(
        self, model: torch.nn.Module, *, scan: bool, unroll: int, remat: Remat, stack_lora: bool = False
    ) -> None:
        """`stack_lora`: LoRA is stored as for a scan, also if the layers are not scanned."""
        located = decoder_layers(model)
        self.prefix, self.layers = located if located is not None else ("", [])
        self.unroll, self.remat = unroll, remat
        uses: dict[int, int] = collections.Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
        canonical: dict[int, str] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            canonical.setdefault(id(parameter), name)
        # For each layer, weights shared with other modules: name in the layer -> first name in the model. They are not
        # stacked.
        self.shared: list[dict[str, str]] = [
            {name: canonical[id(p)] for name, p in layer.named_parameters(remove_duplicate=False) if uses[id(p)] > 1}
            for layer in self.layers
        ]
        signatures = [
            (layer_signature(layer), tuple(sorted(shared.items())), policy_number(remat, i))
            for i, (layer, shared) in enumerate(zip(self.layers, self.shared, strict=True))
        ]
        kinds = [
            (signature, _window_attributes(layer)) for signature, layer in zip(signatures, self.layers, strict=True)
        ]
        self.kinds = [kinds.index(kind) for kind in kinds]  # equal layers have equal numbers
        self.segments = (
            find_segments(signatures) if scan else [RepeatedLayers(i, 1, 1) for i in range(len(self.layers))]
        )
        self.lora_segments = find_segments(signatures) if stack_lora else self.segments
        self.joined: dict[int, tuple[Any, ...]] = {}  # as in `Trace`; found when the first layer is probed
        for i, layer in enumerate(self.layers):
            layer.__dict__["forward"] = functools.partial(self._record, i, layer.forward)

    def slots(self, *, of_lora: bool = False) -> list[tuple[RepeatedLayers, int, str]]:
        """For each traced layer: its segment, its index in the period, and the prefix of its keys in the layout, such
        as `model.layers.0.` or `model.layers.1:4:1.`."""
        result = []
        for segment in self.lora_segments if of_lora else self.segments:
            stop = segment.start + segment.period * segment.repetitions
            for j in range(segment.period):
                i = segment.start + j
                label = f"{i}" if segment.repetitions == 1 else f"{i}:{stop}:{segment.period}"
                result.append((segment, j, f"{self.prefix}.{label}."))
        return result

    def _weights(self, trace: Trace, prefix: str) -> dict[str, jax.Array]:
        return {key[len(prefix) :]: value for key, value in trace.weights.items() if key.startswith(prefix)}

    def _record(self, i: int, forward: Callable[..., object], *args: object, **kwargs: object) -> Any:
        trace = current()
        if trace is None or trace.running_layers:
            return forward(*args, **kwargs)
        if args:
            hidden, args, positional = args[0], args[1:], True
        else:
            hidden, positional = kwargs.pop("hidden_states"), False
        if self.linked:
            return self._run_linked(trace, i, hidden, (positional, args, kwargs))
        if any(isinstance(leaf, NotKept) for leaf in torch_tree.tree_leaves((args, kwargs))):
            raise LinkedLayers(type(self.layers[i]).__name__)
        trace.layer_calls[i] = (positional, args, kwargs)
        trace.running_layers = True
        try:
            if i == 0:
                trace.layer_returns = self._probe(trace, interop.jax_view(hidden))
            num_outputs, dtype = trace.layer_returns
            if i == len(self.layers) - 1:
                hidden = interop.torch_view(self._run(trace, interop.jax_view(hidden).astype(dtype)))
        finally:
            trace.running_layers = False
        return hidden if num_outputs == 0 else (hidden, *(NotKept() for _ in range(num_outputs - 1)))

    def _run_linked(self, trace: Trace, i: int, hidden: torch.Tensor, call: tuple[bool, Any, Any]) -> Any:
        """Runs layer i and returns all its outputs."""
        weights = next(
            {name: w[r] if segment.repetitions > 1 else w for name, w in self._weights(trace, prefix).items()}
            for segment, j, prefix in self.slots()
            for r in range(segment.repetitions)
            if segment.start + j + r * segment.period == i
        )
        trace.layer_calls[i], trace.joined_layers, run_key = call, self.joined, trace.dropout_key

        def body(hidden: jax.Array, weights: dict[str, jax.Array]) -> Any:
            with environment():
                out, additions = self._call(trace, i, weights, interop.torch_view(split_rows(hidden, trace.mesh)))
            assert not additions, "linked layers that also write to a dictionary"
            out = interop.jax_view(out)
            first = split_rows(out[0] if isinstance(out, tuple | list) else out, trace.mesh)
            return (first, *out[1:]) if isinstance(out, tuple | list) else first

        trace.running_layers = True
        trace.dropout_key = run_key if run_key is None else run_key.fold_in(i)
        try:
            return interop.torch_view(
                checkpointed(body, self.remat, i, looped=False)(interop.jax_view(hidden), weights)
            )
        finally:
            trace.running_layers, trace.dropout_key = False, run_key

    def _probe(self, trace: Trace, hidden: jax.Array) -> tuple[int, Any]:
        """What a layer returns: 0 for a tensor or the length of the tuple; and the dtype of the residual stream, which
        may differ from the embedding's. Traces layer 0 for shapes only."""
        segment, _, prefix = self.slots()[0]
        weights = self._weights(trace, prefix)
        if segment.repetitions > 1:
            weights = {name: w[0] for name, w in weights.items()}

        def call(hidden: jax.Array) -> Any:
            with environment():
                return interop.jax_view(self._call(trace, 0, weights, interop.torch_view(hidden))[0])

        out = jax.eval_shape(call, hidden)
        self.joined = trace.joined_layers = joined_layers(self.layers, trace.adapted_inputs.values())
        return (len(out), out[0].dtype) if isinstance(out, tuple | list) else (0, out.dtype)

    def _run(self, trace: Trace, hidden: jax.Array) -> jax.Array:
        slots = self.slots()
        for segment in self.segments:
            prefixes = [prefix for s, _, prefix in slots if s is segment]
            weights = [self._weights(trace, prefix) for prefix in prefixes]
            if segment.repetitions == 1:
                hidden = self._run_layer(trace, hidden, segment.start, weights[0])
                continue
            try:
                hidden = self._scan(trace, hidden, segment, weights)
            except CannotScan:
                for r in range(segment.repetitions):
                    for j, layer_weights in enumerate(weights):
                        one = {name: w[r] for name, w in layer_weights.items()}
                        hidden = self._run_layer(trace, hidden, segment.start + r * segment.period + j, one)
        return hidden

    def _run_layer(self, trace: Trace, hidden: jax.Array, i: int, weights: dict[str, jax.Array]) -> jax.Array:
        """Runs a layer by itself. Layers that are equal and are called alike share a body, which is traced,
        differentiated and lowered once. The compiler inlines it, so the program is the same as with separate layers."""
        positional, args, kwargs = trace.layer_calls[i]
        leaves, structure = torch_tree.tree_flatten((args, kwargs))
        tensors = {at: leaf.jax() for at, leaf in enumerate(leaves) if isinstance(leaf, TORCHAX_TENSORS)}
        others = [leaf for at, leaf in enumerate(leaves) if at not in tensors]
        if any(isinstance(leaf, collections.UserDict | torch.Tensor) for leaf in others):
            return self._run_alone(trace, hidden, i, weights)
        call = (self.kinds[i], positional, structure, others)
        body: Any = next((body for known, body in trace.bodies if known == call), None)
        if body is None:

            def run(
                hidden: jax.Array, weights: dict[str, jax.Array], tensors: dict[int, jax.Array], number: jax.Array
            ) -> jax.Array:
                given = {(0, at): interop.torch_view(tensor) for at, tensor in tensors.items()}
                return self._body(trace, hidden, [i], [weights], [], given, [number])[0]

            body = jax.jit(checkpointed(run, self.remat, i, looped=False))
            trace.bodies.append((call, body))
        out: jax.Array = body(hidden, weights, tensors, np.int32(i))
        return out

    def _run_alone(self, trace: Trace, hidden: jax.Array, i: int, weights: dict[str, jax.Array]) -> jax.Array:
        """Runs a layer that may write to a dictionary."""
        written: list[tuple[Any, list[Any]]] = []

        def run(hidden: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, list[Any]]:
            return self._body(trace, hidden, [i], [weights], written)

        hidden, values = checkpointed(run, self.remat, i, looped=False)(hidden, weights)
        for (dictionary, keys), new in zip(written, values, strict=True):
            dictionary.update(zip(keys, interop.torch_view(new), strict=True))
        return hidden

    def _scan(
        self, trace: Trace, hidden: jax.Array, segment: RepeatedLayers, weights: list[dict[str, jax.Array]]
    ) -> jax.Array:
        varying = self._varying_arguments(trace, segment, hidden.shape[1])
        indices = list(range(segment.start, segment.start + segment.period))
        written: list[tuple[Any, list[Any]]] = []

        def run(indices: list[int], part: slice, hidden: jax.Array, xs: tuple[Any, Any, jax.Array]) -> jax.Array:
            weights, scanned, repetition = xs
            slots = range(segment.period)[part]
            picked = {
                (v.slot - slots.start, v.at): v.pick(x)
                for v, x in zip(varying, scanned, strict=True)
                if v.slot in slots
            }
            numbers = [segment.start + slot + repetition * segment.period for slot in slots]
            hidden, _ = self._body(trace, hidden, indices[part], weights[part], written, picked, numbers)
            if written:
                raise CannotScan("a layer writes to a dictionary shared by all layers")
            return hidden

        def body(hidden: jax.Array, xs: tuple[Any, Any, jax.Array]) -> tuple[jax.Array, None]:
            for part in recomputed_together(self.remat, indices):
                call = functools.partial(run, indices, part)
                hidden = checkpointed(call, self.remat, indices[part][0], looped=True)(hidden, xs)
            return hidden, None

        repetitions = jnp.arange(segment.repetitions)
        unroll = min(self.unroll, segment.repetitions)
        xs = (weights, [v.per_repetition() for v in varying], repetitions)
        whole = slice(segment.period)
        self._check_same_program(
            segment, lambda numbers: jax.make_jaxpr(functools.partial(run, numbers, whole)), hidden, xs
        )
        return jax.lax.scan(body, hidden, xs, unroll=unroll)[0]

    def _body(
        self,
        trace: Trace,
        hidden: jax.Array,
        indices: list[int],
        weights: list[dict[str, jax.Array]],
        written: list[tuple[Any, list[Any]]],
        varying: dict[tuple[int, int], Any] | None = None,
        numbers: Sequence[Any] | None = None,
    ) -> tuple[jax.Array, list[Any]]:
        """Runs these layers once. `numbers` are their indices in the model, which are traced values in a scan.

        Layers may write to a dictionary that they share. Under `jax.checkpoint` such values must leave as outputs, so
        the dictionaries and keys go to `written` and the values are returned; the caller stores them.
        """
        written.clear()
        values: list[Any] = []
        run_key = trace.dropout_key
        with environment():
            out = interop.torch_view(split_rows(hidden, trace.mesh))
            for j, i in enumerate(indices):
                if run_key is not None:
                    trace.dropout_key = run_key.fold_in(numbers[j] if numbers is not None else i)
                arguments = {at: a for (slot, at), a in (varying or {}).items() if slot == j}
                out, additions = self._call(trace, i, weights[j], out, arguments)
                out = out[0] if isinstance(out, tuple | list) else out
                for dictionary, added in additions:
                    written.append((dictionary, list(added)))
                    values.append(interop.jax_view(list(added.values())))
        trace.dropout_key = run_key
        return split_rows(interop.jax_view(out), trace.mesh), values

    def _call(
        self,
        trace: Trace,
        i: int,
        weights: dict[str, jax.Array],
        hidden: torch.Tensor,
        arguments: dict[int, Any] | None = None,
    ) -> tuple[Any, list[tuple[Any, dict[Any, Any]]]]:
        """Calls transformers' own layer with the recorded arguments, of which dictionaries and tensors are new objects:
        tracing has no side effects. Also returns what the layer added to dictionaries."""
        trace.num_wide, trace.adapted_inputs, trace.sums, trace.activated = 0, {}, {}, {}
        positional, args, kwargs = trace.layer_calls[i]
        leaves, structure = torch_tree.tree_flatten((args, kwargs))
        for at, value in (arguments or {}).items():
            leaves[at] = value
        copies = []
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, collections.UserDict):
                leaves[at] = type(leaf)(leaf.data)
                copies.append((leaf, leaves[at]))
            elif isinstance(leaf, TORCHAX_TENSORS):  # a new object: our norms replace the value of their input
                leaves[at] = interop.torch_view(leaf.jax())
        args, kwargs = torch_tree.tree_unflatten(leaves, structure)
        shared = {name: trace.weights[canonical] for name, canonical in self.shared[i].items()}
        if positional:
            args = (hidden, *args)
        else:
            kwargs = {"hidden_states": hidden, **kwargs}
        out = torch.func.functional_call(self.layers[i], interop.torch_view({**weights, **shared}), args, kwargs)
        additions = [
            (original, {key: value for key, value in copy.data.items() if original.data.get(key) is not value})
            for original, copy in copies
        ]
        return out, [(original, added) for original, added in additions if added]

    def _check_same_program(
        self,
        segment: RepeatedLayers,
        tracer: Callable[[list[int]], Callable[..., object]],
        hidden: jax.Array,
        xs: object,
    ) -> None:
        """If repetitions differ in window attributes, trace one of each kind and compare the programs: the signature
        assumes that these attributes only affect the mask."""
        periods = [
            [segment.start + r * segment.period + j for j in range(segment.period)] for r in range(segment.repetitions)
        ]
        kinds = {tuple(_window_attributes(self.layers[i]) for i in period): period for period in reversed(periods)}
        if len(kinds) == 1:
            return
        first = jax.tree.map(lambda array: array[0], xs)
        programs = {_ADDRESS.sub("", str(tracer(period)(hidden, first))) for period in kinds.values()}
        if len(programs) > 1:
            raise CannotScan("layers with different windows differ in more than the mask")

    def _varying_arguments(self, trace: Trace, segment: RepeatedLayers, num_tokens: int) -> list[_Varying]:
        found: list[_Varying] = []
        for j in range(segment.period):
            calls = [
                torch_tree.tree_flatten(trace.layer_calls[segment.start + j + r * segment.period][1:])
                for r in range(segment.repetitions)
            ]
            leaves, structure = calls[0]
            if any(other != structure for _, other in calls):
                raise CannotScan("repetitions are called with different numbers or kinds of arguments")
            for at, leaf in enumerate(leaves):
                values = [other[at] for other, _ in calls]
                if isinstance(leaf, TORCHAX_TENSORS):
                    distinct, which = _distinct([v.jax() for v in values], lambda a, b: a is b)
                elif isinstance(leaf, MaskRule):
                    distinct, which = _distinct([_within(v, num_tokens) for v in values], lambda a, b: a == b)
                    if len(distinct) > 1 and any(rule.chunk is not None for rule in distinct):
                        raise CannotScan("only some layers use chunked attention")
                else:
                    distinct, which = _distinct(values, lambda a, b: a is b or a == b)
                    if len(distinct) > 1:
                        raise CannotScan("repetitions are called with different values")
                if len(distinct) > 1:
                    found.append(_Varying(j, at, distinct, which))
        return found
