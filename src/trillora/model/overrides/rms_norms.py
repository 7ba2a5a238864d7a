"""RMSNorms of any model, computed by `engine.kernels.rms_norm` if `engine.kernels` is `fused`.

As with gated MLPs, a module is recognized by what it computes, not by its name: its code is run with a random weight
and input, and compared with both forms of the norm.

    >>> find_rms_norms(model)                                   # a Gemma model
    [RmsNorm(module=GemmaRMSNorm(…), eps=1e-06, offset=1.0), …]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchax import interop
from torchax.tensor import Tensor

from trillora.engine.kernels.rms_norm import Norm, is_supported, rms_norm
from trillora.model.overrides.torchax_fixes import fused_input
from trillora.model.trace import Replacement, current

EPSILONS = ("variance_epsilon", "eps", "epsilon")  # attributes of the models' own norms
OFFSETS = (0.0, 1.0)
SMALL = 1e-3  # size of the random input, so that a wrong epsilon would be noticed
ROUNDING = 1e-5  # relative, float32


@dataclass(frozen=True)
class RmsNorm:
    module: torch.nn.Module
    eps: float
    offset: float


def find_rms_norms(model: torch.nn.Module) -> list[RmsNorm]:
    """All norms of a model that the kernels can compute."""
    found = []
    for module in model.modules():
        parameters = [name for name, _ in module.named_parameters()]
        if parameters == ["weight"] and module.get_parameter("weight").ndim == 1:
            norm = _recognise(module)
            found += [norm] if norm is not None else []
    return found


def _recognise(module: torch.nn.Module) -> RmsNorm | None:
    """None if the module computes anything else."""
    generator = torch.Generator().manual_seed(0)
    eps = next((value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if eps is None:
        return None
    width = module.weight.shape[0]
    x, weight = SMALL * torch.randn(2, 3, width, generator=generator), torch.randn(width, generator=generator)
    try:
        with torch.no_grad():
            y = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:  # code that needs more than x is something else
        return None
    for offset in OFFSETS:
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)
        if isinstance(y, torch.Tensor) and y.shape == x.shape and torch.allclose(y, expected, rtol=ROUNDING, atol=1e-6):
            return RmsNorm(module, eps, offset)
    return None


def fused_norms(norms: list[RmsNorm]) -> list[Replacement]:
    """Replacements (module, attribute, value) for the time of a trace."""
    return [(norm.module, "forward", functools.partial(_forward, norm, norm.module.forward)) for norm in norms]


def _forward(norm: RmsNorm, original: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
    x, trace, weight = fused_input(*args, **kwargs), current(), norm.module.weight
    if x is None or trace is None or not is_supported(x):
        return original(*args, **kwargs)
    if weight.dtype != args[0].dtype:  # the model's own code may return the wider type
        return original(*args, **kwargs)
    how = Norm(norm.eps, norm.offset, interpret=trace.interpret)
    y, after = rms_norm(x, interop.jax_view(weight), how)
    if type(args[0]) is Tensor:
        args[0]._elem = after  # the same numbers: if they are added to a later result, the kernel adds the gradients
    return interop.torch_view(y)
