"""What travels beside one call of the model.

transformers' signatures have no room for segment ids, a mesh or dropout keys, and its functions for attention, experts
and layers are called from deep inside its code. While a model is traced, they find these values here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import Mesh

from trillora.engine.attention import Implementation
from trillora.engine.hash_random import MaskKey


@dataclass(frozen=True)
class Slots:
    """Where a call that decodes one token writes to the cache, and what it may read there (see `cache`)."""

    slot: jax.Array  # a scalar: prompts end at the same slot, so every row writes to the same one
    starts_B: jax.Array  # the first slot of each row that is not padding
    num_slots: int


@dataclass
class Trace:
    """One trace of the model; B rows, T tokens."""

    weights: dict[str, jax.Array]  # base and adapter, by layout key
    segments_BT: jax.Array | None = None
    positions_BT: jax.Array | None = None
    attention: Implementation = "xla"
    interpret: bool = False  # run TPU kernels step by step on another backend
    mesh: Mesh | None = None
    dropout_key: MaskKey | None = None  # None: no dropout
    slots: Slots | None = None  # set where keys and values come out of a cache
    layer_calls: dict[int, Any] = field(default_factory=dict)  # what transformers passed to each layer
    layer_returns: tuple[int, Any] = (0, None)  # 0 for a bare tensor, else the tuple's length; its type
    running_layers: bool = False  # a layer called now is to run, not to be recorded
    num_attention_calls: int = 0


_current: ContextVar[Trace | None] = ContextVar("trillora_trace", default=None)


def current() -> Trace | None:
    """The trace under way, or None when the module is called as ordinary PyTorch."""
    return _current.get()


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)
