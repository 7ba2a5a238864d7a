"""Text generation with a causal LM: `prefill` reads the prompts, `decode` adds one token. Both are pure functions.

They run transformers' forward through the same bridge as training, with or without an adapter, and with a cache of
fixed shape (`kv_cache`). Layers run one by one: a scan over them makes decoding a third slower on CPU.

Legend: B sequences, P slots of the padded prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from torchax import interop

from trillora.devices.mesh import split_rows
from trillora.errors import TrilloraError
from trillora.model.bridge import CausalLM
from trillora.model.kv_cache import DO, Arrays, StaticCache, check_cache
from trillora.model.layout import Tree, unstack
from trillora.model.limits import why_not_decode
from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.parts.whole_weights import with_whole_weights
from trillora.model.trace import Slots, Trace

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
    ) -> tuple[jax.Array, Arrays]:
        """Logits [B, V] after one more token in each sequence, and the cache with this token in `slot`: a scalar, or
        [B] with a slot for each sequence."""
        trace = self._trace(base, adapter, (slot - starts_B)[:, None])
        trace.slots = Slots(slot, starts_B, num_slots)
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
        self, trace: Trace, tokens: jax.Array, cache: StaticCache, extra: dict[str, Any]
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
        out = model.run(trace, trace.weights, keywords, self._split_at_every_layer())
        if trace.num_attention_calls < cache.num_updates:
            raise TrilloraError(OWN_ATTENTION.format(name=model.name), do=DO)
        logits = split_rows(interop.jax_view(out.logits)[:, -1], model.mesh)
        return logits, jax.tree.map(lambda array: split_rows(array, model.mesh), cache.export(model.name))

    def _split_at_every_layer(self) -> list[tuple[Any, str, Any]]:
        """Replacements that constrain the sharding of every layer's input and output (see `mesh.split_rows`)."""
        mesh = self.model.mesh
        if mesh is None or mesh.size == 1:
            return []

        def split(value: Any) -> Any:
            is_hidden = isinstance(value, TORCHAX_TENSORS) and value.ndim == 3
            return interop.torch_view(split_rows(interop.jax_view(value), mesh)) if is_hidden else value

        def wrapped(forward: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if args:
                    args = (split(args[0]), *args[1:])
                elif "hidden_states" in kwargs:
                    kwargs["hidden_states"] = split(kwargs["hidden_states"])
                out = forward(*args, **kwargs)
                return (split(out[0]), *out[1:]) if isinstance(out, tuple) else split(out)

            return run

        return [(layer, "forward", wrapped(layer.forward)) for layer in self.model.stack.layers]
