"""Recurrent and convolutional layers that reset their state at the first token of every document.

In a packed sequence, attention keeps documents apart by segment ids; a recurrence must reset its state. transformers'
modeling files implement recurrences with a few functions. During a trace these names in a model's own files point to
versions that use the segment ids. Recurrences that are a module of their own are recognized by the arguments of its
forward.

Legend: B sequences, T tokens, C channels, N state size.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torchax import interop
from transformers.activations import ACT2FN

from trillora.model.overrides.torchax_fixes import TORCHAX_TENSORS
from trillora.model.trace import Replacement, current

# A log-decay that resets the state: exp(-100) is below 1e-43, and 100 costs no precision in sums of log-decays.
FORGET = -100.0

Function = Callable[..., Any]


def packing_aware(model: torch.nn.Module) -> list[Replacement]:
    """Replacements (module or class, name, value) for the functions and modules that this model uses."""
    functions = [
        (file, name, aware(getattr(file, name)))
        for file in modelling_files(model)
        for name, aware in MECHANISMS.items()
        if hasattr(file, name)
    ]
    one_of_each = {type(module): module for module in model.modules()}
    modules = [
        (cls, "forward", aware(cls.forward))
        for cls, module in one_of_each.items()
        for applies, aware in MODULES
        if applies(module)
    ]
    methods = [
        (cls, name, aware(getattr(cls, name)))
        for cls in one_of_each
        for name, aware in METHODS.items()
        if hasattr(cls, name)
    ]
    return [*functions, *modules, *methods]


def modelling_files(model: torch.nn.Module) -> list[Any]:
    """The Python modules that define the classes of a model."""
    return [sys.modules[name] for name in sorted({type(m).__module__ for m in model.modules()})]


def _segments(tensor: Any) -> jax.Array | None:
    """The segment ids of the current trace, if any."""
    trace = current()
    return trace.segments_BT if trace is not None and isinstance(tensor, TORCHAX_TENSORS) else None


def starts_of(segments_BT: jax.Array) -> jax.Array:
    """True at the first token of every document."""
    first = jnp.ones_like(segments_BT[:, :1], bool)
    return jnp.concatenate([first, segments_BT[:, 1:] != segments_BT[:, :-1]], axis=1)


def _causal_convolution(original: Function) -> Function:
    """A depthwise convolution that does not reach into the previous document."""

    def convolve(
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **kwargs: object,
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
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor | None = None,
        beta: torch.Tensor | None = None,
        **kwargs: object,
    ) -> Any:
        segments = _segments(query)
        if segments is not None:
            decay = interop.jax_view(g)
            starts = starts_of(segments)
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
        chunk_size: int | None = None,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: object,
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
        resetting = jnp.where(starts_of(segments)[..., None], -FORGET / jnp.abs(rate), step)
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
        D: torch.Tensor | None = None,
        z: torch.Tensor | None = None,
        delta_bias: torch.Tensor | None = None,
        delta_softplus: bool = False,
        return_last_state: bool = False,
        **kwargs: object,
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
            decay_BCTN = jnp.where(starts_of(segments)[:, None, :, None], 0.0, decay_BCTN)
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


def _linear_scan(original: Function) -> Function:
    """h_t = gate_t * h_(t-1) + x_t, as an associative scan; transformers' own version is a Python loop over tokens. The
    model resets it itself, where a position is zero."""

    def scan(
        self: torch.nn.Module,
        hidden_states: torch.Tensor,
        recurrent_gate: torch.Tensor,
        reset: torch.Tensor,
        recurrent_states: torch.Tensor | None,
        **kwargs: object,
    ) -> Any:
        if not isinstance(hidden_states, TORCHAX_TENSORS) or recurrent_states is not None:
            return original(self, hidden_states, recurrent_gate, reset, recurrent_states, **kwargs)
        gate, x = (interop.jax_view(t).astype(jnp.float32) for t in (recurrent_gate, hidden_states))
        gate = jnp.where(interop.jax_view(reset), 0.0, gate)
        _, out = jax.lax.associative_scan(
            lambda left, right: (left[0] * right[0], right[0] * left[1] + right[1]), (gate, x), axis=1
        )
        return interop.torch_view((out.astype(interop.jax_view(hidden_states).dtype), out[:, -1]))

    return scan


def _convolution_module(original: Function) -> Function:
    """A causal convolution over tokens [B, C, T], as a module. Its padding is the number of taps before the last, and
    models cut the surplus at the end of the output; or it has none, and they extend the input at its beginning."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> Any:
        segments, reach = _segments(x), (self.kernel_size[0] - 1) * self.dilation[0]
        if segments is None or self.stride != (1,) or self.padding not in ((0,), (reach,)):
            return original(self, x)
        surplus = self.padding[0]
        array = jnp.pad(interop.jax_view(x), ((0, 0), (0, 0), (surplus, 0)))
        if array.shape[-1] < segments.shape[1] + reach:
            return original(self, x)
        weight, bias = interop.jax_view(self.weight), None if self.bias is None else interop.jax_view(self.bias)
        out = document_convolution(array, weight, bias, segments, self.groups, self.dilation[0])
        return interop.torch_view(jnp.pad(out, ((0, 0), (0, 0), (0, surplus))))

    return forward


def document_convolution(
    x_BCL: jax.Array, weight: jax.Array, bias: jax.Array | None, segments_BT: jax.Array, groups: int, dilation: int = 1
) -> jax.Array:
    """A convolution of an input that has L - T places before its first token. A tap that reaches back beyond the
    beginning of its document gets what these places contain, in all documents."""
    B, C, L = x_BCL.shape
    reach = (weight.shape[-1] - 1) * dilation
    num_out = L - reach
    ids_BL = jnp.pad(segments_BT, ((0, 0), (L - segments_BT.shape[1], 0)), constant_values=-1)
    out = jnp.zeros((B, groups, weight.shape[0] // groups, num_out), jnp.float32)
    for tap in range(weight.shape[-1]):
        at = slice(tap * dilation, tap * dilation + num_out)
        same = ids_BL[:, at] == ids_BL[:, reach:]
        source = jnp.where(same[:, None], x_BCL[..., at], x_BCL[..., :1])
        grouped = source.reshape(B, groups, C // groups, num_out)
        matrices = weight[..., tap].reshape(groups, -1, C // groups)
        out += jnp.einsum("bgcl,gdc->bgdl", grouped, matrices, preferred_element_type=jnp.float32)
    out = out.reshape(B, -1, num_out)
    return (out if bias is None else out + bias[:, None]).astype(x_BCL.dtype)


def _delayed_values(original: Function) -> Function:
    """Attention in which half of every value comes from the token before: none at a document's first token."""

    def forward(self: torch.nn.Module, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        query, key, value = original(self, hidden_states, *args, **kwargs)
        segments = _segments(hidden_states)
        if segments is None:
            return query, key, value
        none = interop.jax_view(self.v_proj_delayed(torch.zeros_like(hidden_states[:1, :1])))
        current_half, delayed = jnp.split(interop.jax_view(value).reshape(*segments.shape, -1), 2, axis=-1)
        delayed = jnp.where(starts_of(segments)[..., None], none, delayed)
        whole = jnp.concatenate([current_half, delayed], axis=-1).reshape(value.shape)
        return query, key, interop.torch_view(whole)

    return forward


def _gated_cell(original: Function) -> Function:
    """The state is multiplied by sigmoid(fgate) at each token, [B, heads, T]."""
    signature = inspect.signature(original)

    def forward(*args: object, **kwargs: object) -> object:
        given = signature.bind(*args, **kwargs)
        segments = _segments(given.arguments["fgate"])
        if segments is not None:
            gate = interop.jax_view(given.arguments["fgate"])
            gate = jnp.where(starts_of(segments)[:, None], FORGET, gate).astype(gate.dtype)
            given.arguments["fgate"] = interop.torch_view(gate)
        return original(*given.args, **given.kwargs)

    return forward


def _decaying_attention(original: Function) -> Function:
    """Linear attention whose state decays at a constant rate ("lightning attention")."""

    @functools.wraps(original)
    def forward(self: torch.nn.Module, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> object:
        segments = _segments(hidden_states)
        if segments is None:
            return original(self, hidden_states, *args, **kwargs)
        B, T, _ = hidden_states.shape
        qkv = self.act_fn(self.qkv_proj(hidden_states)).reshape(B, T, self.num_attention_heads, -1)
        query, key, value = (interop.jax_view(part).astype(jnp.float32) for part in qkv.chunk(3, dim=-1))
        rate = interop.jax_view(self.slope_rate).reshape(-1).astype(jnp.float32)
        out = decaying_attention(query, key, value, rate, segments, self.block_size)
        out = self.norm(interop.torch_view(out.reshape(B, T, -1).astype(interop.jax_view(qkv).dtype)))
        return self.out_proj(torch.sigmoid(self.output_gate(hidden_states)) * out), None

    return forward


def decaying_attention(
    query_BTHD: jax.Array,
    key_BTHD: jax.Array,
    value_BTHE: jax.Array,
    rate_H: jax.Array,
    segments_BT: jax.Array,
    block: int,
) -> jax.Array:
    """The sum of exp(-rate * (t - s)) (q_t . k_s) v_s over the tokens s <= t of the same document, block by block:
    within a block as a matrix, from earlier blocks through a state [B, H, D, E]."""
    B, T, H, D = query_BTHD.shape
    padding = -T % block

    def blocks(array: jax.Array) -> jax.Array:
        filled = jnp.pad(array, ((0, 0), (0, padding)) + ((0, 0),) * (array.ndim - 2), mode="edge")
        return filled.reshape(B, -1, block, *array.shape[2:]).swapaxes(0, 1)

    place = jnp.arange(block)
    distance = place[:, None] - place[None]
    within = jnp.where(distance >= 0, jnp.exp(-rate_H[:, None, None] * jnp.maximum(distance, 0)), 0.0)
    from_state = jnp.exp(-rate_H * (place[:, None] + 1))[None, :, :, None]
    to_state = jnp.exp(-rate_H * (block - 1 - place[:, None]))[None, :, :, None]
    whole_block = jnp.exp(-rate_H * block)[None, :, None, None]

    def step(carry: tuple[jax.Array, jax.Array], xs: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        state, document_B = carry
        query, key, value, segments = xs
        same = segments[:, None, :, None] == segments[:, None, None, :]
        scores = jnp.einsum("bihd,bjhd->bhij", query, key) * within * same
        continues = (segments == document_B[:, None])[:, :, None, None]
        out = jnp.einsum("bhij,bjhe->bihe", scores, value)
        out += jnp.einsum("bihd,bhde->bihe", query * from_state * continues, state)
        last_B = segments[:, -1]
        of_last = (segments == last_B[:, None])[:, :, None, None]
        state = state * whole_block * (last_B == document_B)[:, None, None, None]
        state += jnp.einsum("bjhd,bjhe->bhde", key * to_state * of_last, value)
        return (state, last_B), out

    start = jnp.zeros((B, H, D, value_BTHE.shape[-1])), segments_BT[:, 0]
    _, out = jax.lax.scan(step, start, tuple(blocks(a) for a in (query_BTHD, key_BTHD, value_BTHE, segments_BT)))
    return out.swapaxes(0, 1).reshape(B, T + padding, H, -1)[:, :T]


def _weighted_average(original: Function) -> Function:
    """RWKV's average of all values so far, with weights that decay with distance. transformers' own version is a Python
    loop over tokens. Sums are kept relative to their largest exponent, as there."""

    def average(
        time_decay: torch.Tensor, time_first: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **kwargs: object
    ) -> Any:
        if not isinstance(key, TORCHAX_TENSORS) or kwargs.get("state") is not None or kwargs.get("return_state"):
            return original(time_decay, time_first, key, value, **kwargs)
        decay_C, first_C, key_BTC, value_BTC = (
            interop.jax_view(t).astype(jnp.float32) for t in (time_decay, time_first, key, value)
        )
        segments = _segments(key)
        starts = jnp.zeros(key_BTC.shape[:2], bool) if segments is None else starts_of(segments)

        Carry = tuple[jax.Array, jax.Array, jax.Array]

        def step(carry: Carry, xs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Carry, jax.Array]:
            key, value, start = xs
            total, weight, top = (jnp.where(start[:, None], n, old) for n, old in zip(nothing, carry, strict=True))
            new_top = jnp.maximum(top, key + first_C)
            old, new = jnp.exp(top - new_top), jnp.exp(key + first_C - new_top)
            out = (old * total + new * value) / (old * weight + new)
            top = top - jnp.exp(decay_C)
            new_top = jnp.maximum(top, key)
            old, new = jnp.exp(top - new_top), jnp.exp(key - new_top)
            return (old * total + new * value, old * weight + new, new_top), out

        zeros = jnp.zeros_like(key_BTC[:, 0])
        nothing = (zeros, zeros, zeros - 1e38)
        _, out = jax.lax.scan(step, nothing, (key_BTC.swapaxes(0, 1), value_BTC.swapaxes(0, 1), starts.T))
        return interop.torch_view(out.swapaxes(0, 1).astype(interop.jax_view(key).dtype)), None

    return average


def _shift_module(original: Function) -> Function:
    """Padding that moves every token one place back: [B, T, C]. A document's first token gets zeros."""

    def forward(self: torch.nn.Module, x: torch.Tensor) -> Any:
        out, segments = original(self, x), _segments(x)
        if segments is None or tuple(self.padding) != (0, 0, 1, -1):
            return out
        return interop.torch_view(jnp.where(starts_of(segments)[..., None], 0, interop.jax_view(out)))

    return forward


# Functions of transformers' modeling files, and our wrappers.
MECHANISMS: dict[str, Callable[[Function], Function]] = {
    "causal_conv1d_fn": _causal_convolution,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba_selective_scan": _mamba_scan,
    "rwkv_linear_attention": _weighted_average,
}

# Methods of modules, and our wrappers.
METHODS: dict[str, Callable[[Function], Function]] = {"_rnn_scan": _linear_scan}

# Kinds of modules, and our wrappers of their forward.
MODULES: list[tuple[Callable[[torch.nn.Module], bool], Callable[[Function], Function]]] = [
    (lambda module: type(module) is torch.nn.Conv1d, _convolution_module),
    (lambda module: type(module) is torch.nn.ZeroPad2d, _shift_module),
    (lambda module: {"igate", "fgate"} <= set(inspect.signature(type(module).forward).parameters), _gated_cell),
    (lambda module: hasattr(module, "get_slope_rate"), _decaying_attention),
    (lambda module: hasattr(module, "v_proj_delayed"), _delayed_values),
]
