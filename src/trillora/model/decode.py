"""Text generation with a causal LM: `prefill` reads the prompts, `decode` adds one token. Both are pure functions.

They run transformers' forward through the same bridge as training, with or without an adapter, and with a cache of
fixed shape (`kv_cache`). Layers run one by one: a scan over them makes decoding a third slower on CPU.

Legend: B sequences, P slots of the padded prompts, V vocabulary.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.utils._pytree as torch_tree
from torchax import interop

from trillora.devices.mesh import split_rows
from trillora.errors import TrilloraError
from trillora.model.bridge import CausalLM
from trillora.model.kv_cache import DO, Arrays, StaticCache, check_cache
from trillora.model.layout import Tree, unstack
from trillora.model.limits import why_not_decode
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS, environment
from trillora.model.parts.whole_weights import with_whole_weights
from trillora.model.trace import ChosenAdapters, Replacement, Slots, Trace

OWN_ATTENTION = "{name} computes attention in its own code, which does not use our cache."


class Decoder:
    """Prefill and decode for one model. Use a model with `scan=False` if it is only for generation: stacked weights are
    unstacked in the program, which copies each of them."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.config = model.module.config
        reason = why_not_decode(self.config)
        if reason is not None:
            raise TrilloraError(f"{model.name} cannot generate text here: {reason}.", do=DO)
        if model.attention_style == "mask":
            raise TrilloraError(OWN_ATTENTION.format(name=model.name), do=DO)
        check_cache(self.config)
        empty = StaticCache(self.config, num_slots=1)
        if empty.has_attention and "position_ids" not in model.arguments:
            raise TrilloraError(f"{model.name} takes no position_ids, so prompts cannot be padded.", do=DO)

    def prefill(
        self, base: Tree, adapter: Tree, tokens_BP: jax.Array, starts_B: jax.Array, num_slots: int
    ) -> tuple[jax.Array, Arrays]:
        """Logits [B, V] after the prompts, and the cache. Prompt b is in slots starts_B[b] to P - 1."""
        num_read = tokens_BP.shape[1]
        if num_read >= num_slots:
            raise TrilloraError(
                f"A prompt of {num_read} tokens leaves no room for an answer in a cache of {num_slots}.",
                do=f"use prompts of at most {num_slots - 1} tokens",
            )
        places = jnp.arange(num_read)[None] - starts_B[:, None]
        is_text = (places >= 0).astype(jnp.int32)
        cache = StaticCache(self.config, num_slots)
        trace = self._trace(base, adapter, jnp.maximum(places, 0))
        trace.segments_BT = is_text
        # Segment ids hide the padding from attention. Recurrent layers zero it themselves, given a mask.
        extra = {"attention_mask": interop.torch_view(is_text)} if cache.has_recurrence else {}
        return self._call(trace, tokens_BP, cache, extra)

    def decode(
        self,
        base: Tree,
        adapter: Tree,
        cache: Arrays,
        tokens_B: jax.Array,
        slot: jax.Array,
        starts_B: jax.Array,
        num_slots: int,
        chosen: ChosenAdapters | None = None,
    ) -> tuple[jax.Array, Arrays]:
        """Logits [B, V] after one more token in each sequence, and the cache with this token in `slot`: a scalar, or
        [B] with a slot for each sequence. `chosen`: which of the adapters that `adapter` consists of each one uses."""
        trace = self._trace(base, adapter, (slot - starts_B)[:, None])
        trace.slots, trace.chosen = Slots(slot, starts_B, num_slots), chosen
        logits, new = self._call(trace, tokens_B[:, None], StaticCache(self.config, num_slots, slot, cache), {})
        # A loop needs the same dtypes in every iteration, but a model may compute a state in a wider one.
        return logits, jax.tree.map(lambda array, old: array.astype(old.dtype), new, cache)

    def _trace(self, base: Tree, adapter: Tree, positions: jax.Array) -> Trace:
        model = self.model
        trace = Trace(
            weights=with_whole_weights(unstack(base, model.layout), unstack(adapter, model.adapter_layout)),
            positions_BT=positions,
            attention=model.attention,
            interpret=model.interpret,
            mesh=model.mesh,
        )
        trace.running_layers = True  # no recording: each layer runs when transformers calls it
        return trace

    def _call(
        self, trace: Trace, tokens: jax.Array, cache: StaticCache, extra: Mapping[str, object]
    ) -> tuple[jax.Array, Arrays]:
        model = self.model
        assert trace.positions_BT is not None
        arguments = {
            "input_ids": interop.torch_view(tokens),
            "position_ids": interop.torch_view(trace.positions_BT),
            "past_key_values": cache,
            "cache_params": cache,  # its name in models without attention
            "use_cache": True,
            "logits_to_keep": 1,
            **extra,
        }
        keywords = {name: value for name, value in arguments.items() if name in model.arguments}
        layers = _Layers(model, cache)
        out = model.run(trace, trace.weights, keywords, layers.replacements())
        if trace.num_attention_calls < cache.num_updates:
            raise TrilloraError(OWN_ATTENTION.format(name=model.name), do=DO)
        logits = split_rows(interop.jax_view(out.logits)[:, -1], model.mesh)
        return logits, jax.tree.map(lambda array: split_rows(array, model.mesh), cache.export(model.name))


class _CannotShare(Exception):
    """A layer does more than read and write its own part of the cache."""


class _Layers:
    """The layers of one trace. Those that are equal and are called alike share a function, which is traced and lowered
    once, as in training (`LayerStack`). Its arguments are a layer's weights, its part of the cache, and the tensors
    that it is called with."""

    def __init__(self, model: CausalLM, cache: StaticCache) -> None:
        self._model, self._cache = model, cache
        self._known: list[tuple[Any, Any]] = []  # (what calls have in common, their function or None)
        self._is_inside = False

    def replacements(self) -> list[Replacement]:
        layers = self._model.stack.layers
        if len(layers) != len(self._cache.layers):
            return [(layer, "forward", self._split(layer.forward)) for layer in layers]
        return [
            (layer, "forward", functools.partial(self._run, i, self._split(layer.forward)))
            for i, layer in enumerate(layers)
        ]

    def _run(self, i: int, forward: Callable[..., object], *args: object, **kwargs: object) -> Any:
        leaves, structure = torch_tree.tree_flatten((args, kwargs))
        tensors = {at: leaf.jax() for at, leaf in enumerate(leaves) if isinstance(leaf, TORCHAX_TENSORS)}
        others = [leaf for at, leaf in enumerate(leaves) if at not in tensors]
        if self._is_inside or any(isinstance(leaf, collections.UserDict | torch.Tensor) for leaf in others):
            return forward(*args, **kwargs)
        call = (self._model.stack.kinds[i], self._cache.kind_of(i), structure, others)
        found = [function for known, function in self._known if known == call]
        if not found:
            found = [jax.jit(functools.partial(self._traced, i, leaves, structure))]
        own = self._cache.kept(i)
        try:
            if found[0] is None:
                raise _CannotShare
            out, kept = found[0](_arrays(self._model.stack.layers[i]), tensors, own)
        except _CannotShare:
            self._known.append((call, None))
            self._cache.put(i, own)
            return forward(*args, **kwargs)
        self._known.append((call, found[0]))
        self._cache.put(i, kept)
        return interop.torch_view(out)

    def _traced(
        self, i: int, leaves: list[Any], structure: Any, weights: Tree, tensors: dict[int, jax.Array], own: Any
    ) -> tuple[Any, Any]:
        """Runs layer i with these values in place of its own."""
        cache, layer = self._cache, self._model.stack.layers[i]
        filled = [interop.torch_view(tensors[at]) if at in tensors else leaf for at, leaf in enumerate(leaves)]
        args, kwargs = torch_tree.tree_unflatten(filled, structure)
        mine = cache.kept(i)
        cache.put(i, own)
        before = cache.fingerprint(i)
        self._is_inside = True
        try:
            with environment():
                out = torch.func.functional_call(layer, interop.torch_view(weights), args, kwargs)
        finally:
            self._is_inside = False
        out = interop.jax_view(out)
        if cache.fingerprint(i) != before or not all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(out)):
            raise _CannotShare
        kept = cache.kept(i)
        cache.put(i, mine)
        return out, kept

    def _split(self, forward: Callable[..., object]) -> Callable[..., object]:
        """The forward of a layer with the sharding of its input and output constrained (see `mesh.split_rows`)."""
        mesh = self._model.mesh
        if mesh is None or mesh.size == 1:
            return forward

        def split(value: object) -> Any:
            is_hidden = isinstance(value, TORCHAX_TENSORS) and value.ndim == 3
            return interop.torch_view(split_rows(interop.jax_view(value), mesh)) if is_hidden else value

        def run(*args: object, **kwargs: object) -> Any:
            if args:
                args = (split(args[0]), *args[1:])
            elif "hidden_states" in kwargs:
                kwargs["hidden_states"] = split(kwargs["hidden_states"])
            out = forward(*args, **kwargs)
            return (split(out[0]), *out[1:]) if isinstance(out, tuple) else split(out)

        return run


def _arrays(layer: torch.nn.Module) -> Tree:
    """The weights that a layer has in this trace."""
    tensors: dict[str, Any] = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    return {name: tensor.jax() for name, tensor in tensors.items() if isinstance(tensor, TORCHAX_TENSORS)}
