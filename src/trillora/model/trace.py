"""The context of one call of the model.

Attention, experts, adapters and layers need segment ids, the mesh or the dropout key, but transformers calls them from
deep inside its own code, and its signatures have no parameters for these. So they are stored in a context variable
while a model is traced:

    with tracing(Trace(weights=..., segments_BT=...)):
        module(input_ids=...)   # inside, our attention function reads current().segments_BT
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh

from trillora.engine.attention import Implementation
from trillora.engine.hash_random import MaskKey
from trillora.engine.kernels.product_sum import IN_XLA, Products
from trillora.engine.ragged import BlockDocuments

# What computes the operations between matmuls: XLA, or kernels for a GPU (`overrides.gated_mlps`, `.rms_norms`, and
# the loss). With kernels, layers that have the same input are computed together, with their adapters
# (`engine.kernels.joined_linear`), and `Trace.products` says what adds up their matmuls.
Kernels = Literal["xla", "fused"]

Replacement = tuple[object, str, object]  # an object, the name of its attribute, and the value during a call


@dataclass(frozen=True)
class Slots:
    """Where decoding one token writes to the cache, and what it may read there (see `kv_cache`)."""

    slot: jax.Array  # a scalar if all sequences write to the same slot, else [B]: the slot of each sequence
    starts_B: jax.Array  # the first slot of each sequence that is not padding
    num_slots: int


@dataclass(frozen=True)
class ChosenAdapters:
    """Adapters side by side, as one of rank A·R: adapter 0 has the ranks 0 to R - 1, adapter 1 the next R."""

    adapters_B: jax.Array  # the number of each sequence's adapter
    num_adapters: int


@dataclass
class AdaptedInput:
    """An input of adapted linear layers: the layers that were called with it, and what their A matrices gave."""

    x: jax.Array  # kept, so that its id stays its own
    layers: list[Any] = field(default_factory=list)
    low: dict[int, jax.Array] = field(default_factory=dict)  # by id of the layer
    outputs: dict[int, jax.Array] = field(default_factory=dict)  # with the adapters, if they were computed together


class LinearSum(NamedTuple):
    """The output of a linear layer, and how it is added to something else as a part of the layer's matmuls."""

    output: jax.Array  # kept, so that its id stays its own
    add_to: Callable[[jax.Array], jax.Array]


class Activated(NamedTuple):
    """The output of an activation, and how it was computed."""

    output: jax.Array  # kept, so that its id stays its own
    g: jax.Array
    activation: Callable[[jax.Array], jax.Array]


@dataclass
class Trace:
    """One trace of the model; B sequences, T tokens."""

    weights: dict[str, jax.Array]  # base and adapter, by layout key
    segments_BT: jax.Array | None = None
    positions_BT: jax.Array | None = None
    documents: BlockDocuments | None = None  # where the segments are; None if a sequence may have any number of them
    attention: Implementation = "xla"
    kernels: Kernels = "xla"
    products: Products = IN_XLA
    interpret: bool = False  # run TPU and Triton kernels in the Pallas interpreter, on any backend
    mapped: bool = False  # the call is inside `jax.vmap`, over several adapters
    mesh: Mesh | None = None
    dropout_key: MaskKey | None = None  # None: no dropout. While a layer runs, the key of that layer
    slots: Slots | None = None  # set while decoding with a cache
    chosen: ChosenAdapters | None = None  # set if each sequence uses one of several adapters
    # The rest is written during the trace, by `stack.LayerStack` and our functions.
    layer_calls: dict[int, Any] = field(default_factory=dict)  # the arguments transformers passed to each layer
    bodies: list[tuple[Any, Any]] = field(default_factory=list)  # (what equal layers have in common, their function)
    layer_returns: tuple[int, Any] = (0, None)  # outputs of a layer (0: a tensor, n: a tuple of n), and their dtype
    running_layers: bool = False  # True: a layer that is called runs; False: its call is only recorded
    num_attention_calls: int = 0
    num_wide: int = 0  # linear layers so far, in the current decoder layer, that are wider than their input
    adapted_inputs: dict[int, AdaptedInput] = field(default_factory=dict)  # of the current decoder layer, by id
    sums: dict[int, LinearSum] = field(default_factory=dict)  # of the current decoder layer, by id of the output
    activated: dict[int, Activated] = field(default_factory=dict)  # of the current decoder layer, by id of the output
    joined_layers: dict[int, tuple[Any, ...]] = field(default_factory=dict)  # see lora.joined_layers
    no_grad_depth: int = 0  # how many `torch.no_grad` the model's code is in


_current: ContextVar[Trace | None] = ContextVar("trillora_trace", default=None)


def current() -> Trace | None:
    """The current trace, or None if the module is called as ordinary PyTorch."""
    return _current.get()


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)


@contextlib.contextmanager
def replaced(replacements: Sequence[Replacement]) -> Iterator[None]:
    """Sets attributes (object, attribute, value) and restores them afterwards."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
