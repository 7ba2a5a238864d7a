"""Weights in 8 or 4 bits, multiplied by scales: float8 and int8 with a scale per block, output or tensor, and FP4.

    q_proj.weight             float8 [O, I]
    q_proj.weight_scale_inv   float32 [O / 128, I / 128]; the last block may be smaller
    -> q_proj.weight          code * scale of its block (the name says inverse, but it is a factor)

    method               scale                                      shape
    fp8                  weight_scale_inv, scale, qscale_weight     blocks, or one
    mxfp8                weight_scale_inv, uint8: exponent + 127    one per 32 inputs
    fbgemm_fp8           weight_scale                               one per output
    compressed-tensors   weight_scale                               one per output, group or block, or one

FP4 has two codes in a byte: int8 [O, I / 2] next to float8 weights of the method fp8 (experts of DeepSeek-V4), or
weight_packed uint8 [O, I / 2] of compressed-tensors. A scale is a power of two for 32 inputs (MXFP4), or float8 for 16
inputs, divided by one weight_global_scale (NVFP4).

Scales of activations are not used: training multiplies in the model's type. Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trillora.errors import TrilloraError
from trillora.model.loading.stored.method import StoredMethod
from trillora.model.loading.stored.mxfp4 import pairs
from trillora.model.loading.stored.packed import Packed, Parts, Stored, WrongScale, plain

_SCALES = ("_scale_inv", "_scale")  # after the name of the weight
_SCALES_OF_LAYER = ("scale", "qscale_weight")  # in place of "weight"
_NOT_USED = ("activation_scale", "input_scale", "input_global_scale", "qscale_act", "output_scale", "weight_zero_point")
_WEIGHT, _SCALE, _GLOBAL = "weight", "scale", "global scale"
_LABELS = {
    ("float8", "U8"): "MXFP8",
    ("FP4", "U8"): "MXFP4",
    ("FP4", "F8_E8M0"): "MXFP4",
    ("FP4", "F8_E4M3"): "NVFP4",
}  # by codes and type of the scales
_BIAS = 127  # of exponents in uint8
_LARGEST = 1e18  # of a scale: the product of two larger numbers overflows in float32


@dataclass(frozen=True)
class Scaled(Packed):
    block: tuple[int, int] | None  # by the config
    in_pairs: bool = False  # two codes in a byte

    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        weight = parts[_WEIGHT]
        codes = pairs(weight[start:stop]) if self.in_pairs else weight[start:stop].to(torch.float32)
        scale = _grid(_factors(parts[_SCALE]), weight.dim())
        if parts[_SCALE].dtype == torch.float8_e4m3fn:
            scale = _sound(scale / parts[_GLOBAL].reshape(()).to(torch.float32))
        if scale.dim() != weight.dim() or weight.dim() not in (2, 3):
            raise ValueError("one scale for each block of outputs and inputs is needed")
        num_outputs, num_inputs, own = weight.shape[-2], codes.shape[-1], self.block or (None, None)
        by_output = _block(num_outputs, scale.shape[-2], own[0])
        by_input = _block(num_inputs, scale.shape[-1], own[1])
        if weight.dim() == 3:  # experts
            scale = scale[start:stop] if len(scale) == len(weight) else scale.expand(stop - start, -1, -1)
            outputs = torch.arange(num_outputs)
        else:
            outputs = torch.arange(start, stop)
        return codes * scale[..., outputs // by_output, :][..., torch.arange(num_inputs) // by_input]

    def codes(self, parts: Parts, format: str) -> dict[str, torch.Tensor] | None:
        """One scale per output, or for all: the layout of `engine.quantize`."""
        weight = parts[_WEIGHT]
        same = (weight.dtype, format) in ((torch.float8_e4m3fn, "fp8"), (torch.int8, "int8"))
        if not same or weight.dim() != 2 or self.in_pairs:
            return None
        factors = _grid(_factors(parts[_SCALE]), 2)
        if factors.shape not in ((len(weight), 1), (1, 1)):
            return None
        return {"q": weight, "scale": factors[:, 0].expand(len(weight))}


def _factors(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype == torch.uint8:
        return _sound((scale.to(torch.float32) - _BIAS).exp2())
    return _sound(scale.to(torch.float32))


def _sound(factors: torch.Tensor) -> torch.Tensor:
    """Refuses factors that no quantization computes. The weights would be finite or not, and every step be skipped."""
    wrong = factors[~((factors >= 0) & (factors <= _LARGEST))]
    if wrong.numel():
        raise WrongScale(f"{wrong[0]:.3g}")
    return factors


def _grid(scale: torch.Tensor, num_dims: int) -> torch.Tensor:
    """One scale for all, or one per expert or output, as a grid of blocks."""
    if scale.dim() < 2:
        return scale.reshape(-1, *[1] * (num_dims - 1))
    return scale


def _block(size: int, count: int, configured: int | None) -> int:
    """How many rows or columns share a scale. The last block may be smaller than the config says."""
    if configured and -(-size // configured) == count:
        return configured
    if count and size % count == 0:
        return size // count
    raise ValueError(f"{size} cannot be split into {count} blocks")


def find(tensors: Mapping[str, Stored], method: StoredMethod | None) -> dict[str, Stored]:
    """The weights in these formats, by the names that they have in an unquantized checkpoint."""
    found = {}
    for stored_name, tensor in tensors.items():
        name = stored_name.removesuffix("_packed")
        kind = _kind(tensor, method, is_packed=name != stored_name)
        if kind is None or len(tensor.shape) not in (2, 3):
            continue
        layer = name.removesuffix("weight")
        names = [name + end for end in _SCALES]
        names += [layer + end for end in _SCALES_OF_LAYER] if layer != name else []
        scale = next((tensors[each] for each in names if each in tensors), None)
        if scale is None:
            continue  # refused if the model needs it: codes without their scale are no weights
        unused = {end: tensors[layer + end] for end in _NOT_USED if layer != name and layer + end in tensors}
        if "weight_zero_point" in unused and kind != "float8":
            raise TrilloraError(
                f"{name} is stored in {kind} with zero points, which cannot be read.",
                where=str(tensor.file),
                do="use the unquantized (bfloat16) version of the model",
            )
        parts = {_WEIGHT: tensor, _SCALE: scale, **unused}
        if whole := tensors.get(f"{name}_global_scale"):
            parts[_GLOBAL] = whole
        label = _LABELS.get((kind, scale.dtype), kind)
        *others, width = tensor.shape
        in_pairs = kind == "FP4"
        packed = Scaled(label, parts, method.block if method else None, in_pairs)
        found[name] = plain(name, (*others, width * 2 if in_pairs else width), packed)
    return found


def _kind(tensor: Stored, method: StoredMethod | None, *, is_packed: bool) -> str | None:
    """What the codes of a tensor are; None: it has none."""
    name = method.name if method else None
    if tensor.dtype in ("F8_E4M3", "F8_E5M2") and not is_packed:
        return "float8"
    if tensor.dtype == "I8" and not is_packed:
        return {"compressed-tensors": "int8", "fp8": "FP4"}.get(name or "")
    return "FP4" if tensor.dtype == "U8" and is_packed and name == "compressed-tensors" else None
