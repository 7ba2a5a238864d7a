"""Gated MLPs of any model, computed by `engine.kernels.gated_mlp` if `engine.kernels` is `fused`.

A module is replaced only if its own code computes `down(act(gate(x)) * up(x))` and nothing else. That is found out by
running it, not by its name: its three linear layers return random numbers, and what the code does with them is compared
with each activation that the kernels have.

    >>> find_gated_mlps(model)          # a Llama with LoRA on all its linear layers
    [GatedMlp(module=LlamaMLP(…), gate=Linear(…), up=Linear(…), down=Linear(…), activation='silu'), …]

All three layers need plain LoRA: without dropout, DoRA or PiSSA, and with a base that is not quantized.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.ad_checkpoint import checkpoint_name
from torch.nn import functional
from torchax import interop

from trillora.engine.kernels.gated_mlp import Activation, Middle, MlpForm, is_supported, middle, padded_rank
from trillora.engine.kernels.joined_linear import joined_linear, linear_and_low
from trillora.model.overrides.sums import output_with_note
from trillora.model.overrides.torchax_fixes import fused_input
from trillora.model.remat import SMALL, name_of_output
from trillora.model.trace import Replacement, Trace, current, replaced

IN_TORCH: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}
ROUNDING = 1e-5  # relative, float32. The two kinds of gelu differ by up to 5e-4
SAMPLES = (2, 5)  # sequences and tokens of the random input


@dataclass(frozen=True)
class GatedMlp:
    """A module, its linear layers and its activation."""

    module: torch.nn.Module
    gate: Any
    up: Any
    down: Any
    activation: Activation

    @property
    def rank(self) -> int | None:
        """Of the kernels; None if they have none that is large enough."""
        return padded_rank(*(layer.lora_a.shape[0] for layer in (self.gate, self.up, self.down)))


def find_gated_mlps(model: torch.nn.Module) -> list[GatedMlp]:
    """All modules of a model that the kernels can compute."""
    found = []
    for module in model.modules():
        layers = {name: child for name, child in module.named_children() if hasattr(child, "lora_a")}
        if len(layers) == 3 and all(layer.is_plain for layer in layers.values()):
            mlp = _recognise(module, layers)
            found += [mlp] if mlp is not None and mlp.rank is not None else []
    return found


def _recognise(module: torch.nn.Module, layers: dict[str, Any]) -> GatedMlp | None:
    """None if the module computes anything else."""
    generator = torch.Generator().manual_seed(0)
    calls: list[tuple[str, Any, torch.Tensor]] = []  # layer, input, output

    def record(name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = 3 * torch.randn(*SAMPLES, layers[name].out_features, generator=generator)
        out[..., 0] *= 30  # so that a limit of the values would be noticed
        calls.append((name, args[0] if len(args) == 1 and not kwargs else None, out))
        return out

    x = torch.randn(*SAMPLES, next(iter(layers.values())).in_features, generator=generator)
    stand_ins = [(layer, "forward", functools.partial(record, name)) for name, layer in layers.items()]
    try:
        with replaced(stand_ins), torch.no_grad():
            y = type(module).forward(module, x)
    except Exception:  # code that needs more than x, or weights, is something else
        return None
    finally:
        for layer in layers.values():
            layer.__dict__.pop("forward", None)
    if len({name for name, _, _ in calls}) != 3 or len(calls) != 3 or y is not calls[-1][2]:
        return None
    *first, (down, h, _) = calls
    if h is None or any(given is not x for _, given, _ in first):
        return None
    for ((gate, _, g), (up, _, u)), (activation, function) in itertools.product(
        itertools.permutations(first), IN_TORCH.items()
    ):
        expected = function(g) * u if g.shape == u.shape else None
        if expected is not None and h.shape == expected.shape and torch.allclose(h, expected, rtol=ROUNDING, atol=1e-6):
            return GatedMlp(module, layers[gate], layers[up], layers[down], activation)
    return None


def fused_forwards(mlps: list[GatedMlp]) -> list[Replacement]:
    """Replacements (module, attribute, value) for the time of a trace."""
    return [(mlp.module, "forward", functools.partial(_forward, mlp, mlp.module.forward)) for mlp in mlps]


def _forward(mlp: GatedMlp, original: Callable[..., object], *args: object, **kwargs: object) -> object:
    x, trace = fused_input(*args, **kwargs), current()
    if x is None or trace is None:
        return original(*args, **kwargs)
    num_rows = x.size // x.shape[-1]
    if not is_supported(num_rows, mlp.gate.out_features, x.dtype, interpret=trace.interpret):
        return original(*args, **kwargs)
    return interop.torch_view(_computed(mlp, x, trace))


def _computed(mlp: GatedMlp, x: jax.Array, trace: Trace) -> jax.Array:
    """What a remat policy saves has the names that it has without the kernels."""
    rank, dtype = mlp.rank, x.dtype
    assert rank is not None

    def matrices(layer: Any) -> tuple[jax.Array, jax.Array]:
        """A [R, D], and B [E, R] times the scale, with zeros up to the rank of the kernels."""
        a, b = interop.jax_view(layer.lora_a), interop.jax_view(layer.lora_b) * layer.lora_scale
        missing = rank - a.shape[0]
        return jnp.pad(a, ((0, missing), (0, 0))).astype(dtype), jnp.pad(b, ((0, 0), (0, missing))).astype(dtype)

    def named(y: jax.Array, layer: Any) -> jax.Array:
        saved: jax.Array = checkpoint_name(y, name_of_output(layer.in_features, y.shape[-1], trace))
        return saved

    (ag, bg), (au, bu), (ad, bd) = map(matrices, (mlp.gate, mlp.up, mlp.down))
    rows = x.reshape(-1, x.shape[-1])
    weights = [layer.frozen_weight() for layer in (mlp.gate, mlp.up)]
    (g0, u0), low = joined_linear(rows, weights, jnp.concatenate([ag, au]), trace.products)
    given = Middle(named(g0, mlp.gate), named(u0, mlp.up), checkpoint_name(low, SMALL), bg, bu, ad)
    h, ld = middle(given, MlpForm(mlp.activation, interpret=trace.interpret))
    h, ld = (array.reshape(*x.shape[:-1], -1) for array in (h, checkpoint_name(ld, SMALL)))
    name = name_of_output(mlp.down.in_features, mlp.down.out_features, trace)
    weight = mlp.down.frozen_weight()
    return output_with_note(lambda other: linear_and_low(h, weight, ld, bd, other, trace.products), name, trace)
