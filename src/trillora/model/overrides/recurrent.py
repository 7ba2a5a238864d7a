"""Recurrent and convolutional layers that reset their state at the first token of every document.

In a packed sequence, attention keeps documents apart by segment ids; a recurrence must reset its state. transformers'
modelling files implement recurrences with a few functions. During a trace these names in a model's own files point to
versions that use the segment ids.

Legend: B sequences, T tokens, C channels, N state size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop
from transformers.activations import ACT2FN

from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import current

# A log-decay that resets the state: exp(-100) is below 1e-43, and 100 costs no precision in sums of log-decays.
FORGET = -100.0

Function = Callable[..., Any]


def packing_aware(model: torch.nn.Module) -> list[tuple[Any, str, Any]]:
    """Replacements (module, name, value) for the functions that this model uses."""
    return [
        (file, name, aware(getattr(file, name)))
        for file in modelling_files(model)
        for name, aware in MECHANISMS.items()
        if hasattr(file, name)
    ]


def modelling_files(model: torch.nn.Module) -> list[Any]:
    """The Python modules that define the classes of a model."""
    return [sys.modules[name] for name in sorted({type(m).__module__ for m in model.modules()})]


def _segments(tensor: Any) -> jax.Array | None:
    """The segment ids of the current trace, if any."""
    trace = current()
    return trace.segments_BT if trace is not None and isinstance(tensor, TORCHAX_TENSORS) else None


def _starts(segments_BT: jax.Array) -> jax.Array:
    """True at the first token of every document."""
    first = jnp.ones_like(segments_BT[:, :1], bool)
    return jnp.concatenate([first, segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)


def _causal_convolution(original: Function) -> Function:
    """A depthwise convolution that does not reach into the previous document."""

    def convolve(
        hidden_states: torch.Tensor, weight: torch.Tensor, bias: Any = None, activation: Any = None, **kwargs: Any
    ) -> Any:
        segments = _segments(hidden_states)
        if segments is None:
            given = {} if activation is None else {"activation": activation}
            return original(hidden_states, weight, bias, **given, **kwargs)
        x_BCT, taps = interop.jax_view(hidden_states), interop.jax_view(weight)
        num_taps, num_tokens = taps.shape[-1], x_BCT.shape[-1]
        out = jnp.zeros_like(x_BCT, dtype=jnp.float32)
        for back in range(num_taps):
            past = jnp.pad(x_BCT, ((0, 0), (0, 0), (back, 0)))[..., :num_tokens]
            past_segments = jnp.pad(segments, ((0, 0), (back, 0)), constant_values=-1)[:, :num_tokens]
            out += taps[:, num_taps - 1 - back][None, :, None] * past * (segments == past_segments)[:, None, :]
        if bias is not None:
            out += interop.jax_view(bias)[None, :, None]
        result = interop.torch_view(out.astype(x_BCT.dtype))
        return result if activation is None else ACT2FN[activation](result)

    return convolve


def _gated_delta_rule(original: Function) -> Function:
    """The state decays by exp(g) at each token; at a document's first token it decays to zero."""

    def delta_rule(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: Any = None, beta: Any = None, **kwargs: Any
    ) -> Any:
        segments = _segments(query)
        if segments is not None:
            decay = interop.jax_view(g)
            starts = _starts(segments)
            starts = starts.reshape(starts.shape + (1,) * (decay.ndim - 2))
            g = interop.torch_view(jnp.where(starts, FORGET, decay).astype(decay.dtype))
        return original(query, key, value, g=g, beta=beta, **kwargs)

    return delta_rule


def _mamba2_scan(original: Function) -> Function:
    """The state decays by exp(dt A), and a token adds dt * x. At a document's first token dt is set so large that the
    state decays to zero, and x is rescaled so that dt * x stays the same."""

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        chunk_size: Any = None,
        D: Any = None,
        dt_bias: Any = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> Any:
        segments = _segments(hidden_states)
        if segments is None:
            options = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
            return original(hidden_states, dt, A, B, C, chunk_size=chunk_size, **options, **kwargs)
        x, step, rate = (interop.jax_view(t).astype(jnp.float32) for t in (hidden_states, dt, A))
        if dt_bias is not None:
            step = step + interop.jax_view(dt_bias)
        if dt_softplus:
            step = jax.nn.softplus(step)
        step = jnp.clip(step, *dt_limit)
        resetting = jnp.where(_starts(segments)[..., None], -FORGET / jnp.abs(rate), step)
        rescaled = interop.torch_view(x * (step / resetting)[..., None])
        out = interop.jax_view(
            original(rescaled, interop.torch_view(resetting), A, B, C, chunk_size=chunk_size, **kwargs)
        )
        if D is not None:
            out = out + interop.jax_view(D).reshape(1, 1, -1, 1) * x
        return interop.torch_view(out)

    return scan


def _mamba_scan(original: Function) -> Function:
    """An associative scan, reset at document starts; transformers' own version is a Python loop over tokens."""

    def scan(
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: Any = None,
        z: Any = None,
        delta_bias: Any = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(hidden_states, TORCHAX_TENSORS) or return_last_state:
            options = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
            return original(hidden_states, dt, A, B, C, **options, return_last_state=return_last_state, **kwargs)
        x_BCT, step, rate, b_BNT, c_BNT = (
            interop.jax_view(t).astype(jnp.float32) for t in (hidden_states, dt, A, B, C)
        )
        if delta_bias is not None:
            step = step + interop.jax_view(delta_bias)[..., None]
        if delta_softplus:
            step = jax.nn.softplus(step)
        decay_BCTN = jnp.exp(rate[None, :, None, :] * step[..., None])
        segments = _segments(hidden_states)
        if segments is not None:
            decay_BCTN = jnp.where(_starts(segments)[:, None, :, None], 0.0, decay_BCTN)
        added_BCTN = step[..., None] * b_BNT.swapaxes(1, 2)[:, None] * x_BCT[..., None]
        _, state = jax.lax.associative_scan(
            lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]), (decay_BCTN, added_BCTN), axis=2
        )
        out = jnp.einsum("bctn,bnt->bct", state, c_BNT)
        if D is not None:
            out = out + x_BCT * interop.jax_view(D)[None, :, None]
        if z is not None:
            out = out * jax.nn.silu(interop.jax_view(z).astype(out.dtype))
        return interop.torch_view(out.astype(interop.jax_view(hidden_states).dtype))

    return scan


# Functions of transformers' modelling files, and our wrappers.
MECHANISMS: dict[str, Callable[[Function], Function]] = {
    "causal_conv1d_fn": _causal_convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
}
