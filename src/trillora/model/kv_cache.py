"""The key/value cache for generation: a `Cache` for transformers, a list of arrays of fixed shape for JAX.

Prompts are padded on the left, so that all of them end at the same slot. Then one scalar says where the next token is
written, and recurrent states end at the last token. Example: prompts of 2 and 4 tokens in a cache of 6 slots, while the
first generated token (x) is written to slot 4:

    slot        0   1   2   3   4   5
    sequence 0  .   .   a   b   x   .     starts_B = [2, 0], slot = 4
    sequence 1  c   d   e   f   x   .

Sequences that join at different times have a slot each: `slot` is then an array [B].

Every layer is a ring buffer: the token of slot p is stored at p modulo the number of slots it keeps. A layer with a
sliding window of W tokens keeps only W: with W = 3, slots 2, 3 and 4 are stored at 2, 0 and 1. The other layers keep
all. There, a sequence that goes past the end continues in the slots of its own padding: a cache of S slots has room
for sequences of S tokens, wherever they start.

The objects exist for one trace. They are created from arrays, and `export` returns the arrays for the next call.

Legend: B sequences, K key/value heads, S slots, D width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop
from transformers import cache_utils

from trillora.engine.attention import MaskRule
from trillora.errors import TrilloraError
from trillora.model.trace import Slots

if TYPE_CHECKING:
    from trillora.model.loading.types import PretrainedConfig

Arrays = list[dict[str, jax.Array]]  # one dictionary per layer of the cache
STATELESS = ("moe", "mlp")  # kinds of layers that transformers lists with the caches but that store nothing
DO = "choose another architecture for generation; this one can only be trained"


def visible_in_cache(rule: MaskRule, slots: Slots, num_held: int) -> jax.Array:
    """Which of a layer's `num_held` slots the current token attends to, as a boolean array [B, 1, 1, S].

    With `num_held` = 3 and the current token in slot 4, the ring contains the tokens of slots `held` = [3, 4, 2].
    """
    if num_held < slots.num_slots and (rule.window is None or rule.window > num_held):
        raise TrilloraError(f"A layer stores {num_held} tokens but attends to more.", do=DO)
    now, starts = slots.slot.reshape(-1, 1), slots.starts_B[:, None]
    held = held_slots(now, num_held)
    mask = held >= starts  # false for padding, and for slots not yet written, where `held` is negative
    if rule.window is not None:
        mask &= now - held < rule.window
    if rule.chunk is not None:
        mask &= (now - starts) // rule.chunk == (held - starts) // rule.chunk
    return mask[:, None, None]


def held_slots(now: jax.Array, num_held: int) -> jax.Array:
    """The slot whose token is stored at each index of a ring: the latest p <= now with p % num_held == index."""
    return now - (now - jnp.arange(num_held)) % num_held


def resized(config: PretrainedConfig, arrays: Arrays, last_B: jax.Array, num_slots: int) -> Arrays:
    """The cache with another number of slots, for sequences of at most `num_slots` tokens whose last one is in slot
    `last_B`. Recurrent states have no slots: they stay as they are."""

    def moved(array: jax.Array, size: int) -> jax.Array:
        if array.shape[2] == size:
            return array
        # Indices of tokens that the old ring does not have get another token. They are never visible.
        index_BS = held_slots(last_B[:, None], size) % array.shape[2]
        return jnp.take_along_axis(array, index_BS[:, None, :, None], axis=2)

    return [
        {name: moved(a, layer.num_slots) if name in ("keys", "values") else a for name, a in kept.items()}
        for kept, layer in zip(arrays, StaticCache(config, num_slots).layers, strict=True)
    ]


class _KeysAndValues(cache_utils.CacheLayerMixin):
    """Keys and values [B, K, S, D] of one layer."""

    is_compileable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, slot: jax.Array | None, num_slots: int) -> None:
        super().__init__()
        self.slot, self.num_slots, self.num_updates = slot, num_slots, 0
        self.is_initialized = slot is not None

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Does nothing: the arrays come from `StaticCache`."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: object, **kwargs: object) -> tuple[Any, Any]:
        """Stores keys and values, and returns those for attention: the prompt's own at first, then the whole buffer."""
        self.num_updates += 1
        new = interop.jax_view(keys), interop.jax_view(values)
        if self.slot is None:
            self.keys, self.values = (interop.torch_view(self._buffer(array)) for array in new)
            return keys, values
        at = self.slot % self.num_slots
        self.keys, self.values = (
            interop.torch_view(_written(old, array.astype(old.dtype), at))
            for old, array in zip((interop.jax_view(self.keys), interop.jax_view(self.values)), new, strict=True)
        )
        return self.keys, self.values

    def _buffer(self, array: jax.Array) -> jax.Array:
        """A prompt's keys or values as a buffer: padded at the end if they fit. Otherwise the last `num_slots` of them,
        rotated to their places in the ring."""
        surplus = array.shape[2] - self.num_slots
        if surplus > 0:
            return jnp.roll(array[:, :, surplus:], surplus, axis=2)
        return jnp.pad(array, ((0, 0), (0, 0), (0, -surplus), (0, 0)))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.slot is None else self.num_slots), 0

    def get_seq_length(self) -> Any:
        return 0 if self.slot is None else interop.torch_view(self.slot.max())

    def get_max_length(self) -> int:
        return self.num_slots


def _written(old: jax.Array, new: jax.Array, at: jax.Array) -> jax.Array:
    """The buffer [B, K, S, D] with one token more: at the same index in all sequences, or at one index in each."""
    if at.ndim == 0:
        return jax.lax.dynamic_update_slice_in_dim(old, new, at, axis=2)
    return old.at[jnp.arange(len(at)), :, at].set(new[:, :, 0], mode="promise_in_bounds", unique_indices=True)


class _Recurrent(cache_utils.LinearAttentionCacheLayerMixin):
    """Convolution and recurrent states of one layer: transformers' interface without its in-place updates."""

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Does nothing: the arrays come from `StaticCache`."""

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **kwargs: Any
    ) -> Any:
        old = self.conv_states[state_idx]
        whole = conv_states if old is None else torch.cat([old, conv_states], dim=-1)
        size = conv_kernel_size or (conv_states if old is None else old).shape[-1]
        if whole.shape[-1] < size:
            whole = torch.nn.functional.pad(whole, (size - whole.shape[-1], 0))
        self.conv_states[state_idx], self.has_previous_state[state_idx] = whole[..., -size:].clone(), True
        return whole

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **kwargs: object) -> Any:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


class _Both(_Recurrent, _KeysAndValues):
    """A layer with both attention and a recurrence."""

    def __init__(self, slot: jax.Array | None, num_slots: int, **kwargs: object) -> None:
        _KeysAndValues.__init__(self, slot, num_slots)
        _Recurrent.__init__(self, **kwargs)


# Our class for each of transformers' static cache layers. Others (indexed, compressed) have state we do not support.
_KINDS: dict[type, type] = {
    cache_utils.StaticLayer: _KeysAndValues,
    cache_utils.StaticSlidingWindowLayer: _KeysAndValues,
    cache_utils.LinearAttentionLayer: _Recurrent,
    cache_utils.LinearAttentionAndStaticFullAttentionLayer: _Both,
    cache_utils.LinearAttentionAndStaticSlidingWindowAttentionLayer: _Both,
}


class StaticCache(cache_utils.Cache):
    """The cache of one trace. `slot` is None while the prompt is read; `arrays` come from `export` of the last call."""

    def __init__(
        self, config: PretrainedConfig, num_slots: int, slot: jax.Array | None = None, arrays: Arrays | None = None
    ):
        self.kinds, self._options = _kinds(config)
        super().__init__(layers=[self._layer(i, num_slots, slot) for i in range(len(self.kinds))])
        for i, kept in enumerate(arrays or []):
            self.put(i, kept)

    def put(self, i: int, kept: dict[str, jax.Array]) -> None:
        """Gives layer i these arrays and no others."""
        layer, tensors = self.layers[i], interop.torch_view(kept)
        if isinstance(layer, _KeysAndValues):
            layer.keys, layer.values = tensors.get("keys"), tensors.get("values")
        states = _states(layer)
        for name, store, number in states:
            store[number] = tensors.get(name)
            layer.has_previous_state[number] = any(other in tensors for other, _, n in states if n == number)

    def kept(self, i: int) -> dict[str, jax.Array]:
        """The arrays of layer i."""
        layer = self.layers[i]
        kept = {n: interop.jax_view(store[number]) for n, store, number in _states(layer) if store[number] is not None}
        if isinstance(layer, _KeysAndValues) and layer.keys is not None:
            kept |= {"keys": interop.jax_view(layer.keys), "values": interop.jax_view(layer.values)}
        return kept

    def kind_of(self, i: int) -> tuple[Any, ...]:
        """What the layers of the cache that can take each other's place have in common."""
        return self.kinds[i], str(self._options[i]), getattr(self.layers[i], "num_slots", None)

    def fingerprint(self, i: int) -> tuple[Any, ...]:
        """Changes if anything but layer i does."""
        others = [layer for number, layer in enumerate(self.layers) if number != i]
        values = [getattr(layer, name, None) for layer in others for name in ("keys", "values")]
        values += [store[number] for layer in others for _, store, number in _states(layer)]
        own = [(id(value), len(value) if isinstance(value, dict | list) else 0) for value in vars(self).values()]
        return (*map(id, values), *own)

    def _layer(self, i: int, num_slots: int, slot: jax.Array | None) -> Any:
        kind, options = self.kinds[i], self._options[i]
        cls = _kind_class(kind)
        states = {"number_of_states": options.get("number_of_states", 1)} if issubclass(cls, _Recurrent) else {}
        if cls is _Recurrent:
            return _Recurrent(**states)
        is_windowed = issubclass(cache_utils.STATIC_LAYER_TYPE_MAPPING[kind], cache_utils.StaticSlidingWindowLayer)
        # Chunks are counted from the start of each text, so their slots differ between sequences: keep all slots.
        window = options.get("sliding_window") if is_windowed and kind != "chunked_attention" else None
        return cls(slot, min(num_slots, window or num_slots), **states)

    @property
    def has_recurrence(self) -> bool:
        return any(isinstance(layer, _Recurrent) for layer in self.layers)

    @property
    def has_attention(self) -> bool:
        return any(isinstance(layer, _KeysAndValues) for layer in self.layers)

    @property
    def num_updates(self) -> int:
        return sum(getattr(layer, "num_updates", 0) for layer in self.layers)

    def export(self, name: str) -> Arrays:
        """The arrays for the next call. A layer that stored nothing is an error: it would forget all earlier tokens."""
        arrays: Arrays = []
        for i, (kind, layer) in enumerate(zip(self.kinds, self.layers, strict=True)):
            kept = self.kept(i)
            has_state = kept.keys() > {"keys", "values"} or (bool(kept) and "keys" not in kept)
            keeps_all = not isinstance(layer, _Recurrent) or has_state or kind in STATELESS
            if isinstance(layer, _KeysAndValues):
                keeps_all = keeps_all and "keys" in kept
            if not keeps_all:
                raise TrilloraError(f"{name} does not use transformers' cache in its {kind} layers.", do=DO)
            arrays.append(kept)
        return arrays


def moved(cache: Arrays, shift: jax.Array) -> Arrays:
    """The cache with every token `shift` slots later. Full layers have free slots at their end; in the ring of a window
    the places move round. Recurrent states have no slots."""
    return [
        {name: jnp.roll(a, shift, axis=2) if name in ("keys", "values") else a for name, a in kept.items()}
        for kept in cache
    ]


def check_cache(config: PretrainedConfig) -> None:
    """Refuses a model with an unsupported kind of cache."""
    for kind in _kinds(config)[0]:
        _kind_class(kind)


def _kinds(config: PretrainedConfig) -> tuple[list[str], list[dict[str, Any]]]:
    """The kind of every layer, and transformers' options for its cache layer."""
    kinds, options = cache_utils.get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    # Older versions return one dictionary for all layers.
    return kinds, [options] * len(kinds) if isinstance(options, dict) else options


def _kind_class(kind: str) -> type:
    theirs = cache_utils.STATIC_LAYER_TYPE_MAPPING.get(kind)
    if theirs not in _KINDS:
        raise TrilloraError(f"The cache of {kind} layers is not supported yet.", do=DO)
    return _KINDS[theirs]


def _states(layer: Any) -> list[tuple[str, dict[int, Any], int]]:
    """(name, dictionary, key) of every convolution and recurrent state of a layer."""
    return [
        (f"{name}{number}", store, number)
        for number in range(getattr(layer, "number_of_states", 0))
        for name, store in (("convolution", layer.conv_states), ("recurrence", layer.recurrent_states))
    ]
