"""The weights of a quantized checkpoint as ordinary numbers: bitsandbytes' 4-bit formats, and float8 with scales.

q_proj.weight                                   uint8 [n / 2, 1]: two codes in a byte, the first in the high bits
q_proj.weight.quant_map                         float32 [16]: the value of each code
q_proj.weight.absmax                            one factor per block; uint8 codes if they are quantized too, with
q_proj.weight.nested_quant_map, .nested_absmax  their values, and one factor per block of them
q_proj.weight.quant_state.bitsandbytes__nf4     JSON in uint8: shape, block sizes, nested_offset

q_proj.weight                                   float8 [E, D]
q_proj.weight_scale_inv                         float32 [E / 128, D / 128]; or weight_scale, also one per row or one
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import BaseModel, Field

from trillora.errors import TrilloraError
from trillora.files.read_json import parse_json
from trillora.model.loading.weights import Stored

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SCALES = ("_scale_inv", "_scale")
_DO = "download the file again, or give the unquantized version of the model with --base"
Size = Annotated[int, Field(ge=1, le=1 << 40)]
Read = Callable[[Stored], np.ndarray]


class _State(BaseModel):
    """bitsandbytes' description of a weight."""

    shape: Annotated[list[Size], Field(min_length=1, max_length=4)]
    blocksize: Size
    nested_blocksize: Size = 256
    nested_offset: float = 0.0


@dataclass(frozen=True)
class Packed:
    """A quantized weight."""

    format: str  # for people
    weight: Stored  # as it is in the file
    parts: dict[str, Stored]  # by the end of their names


def find_packed(tensors: Mapping[str, Stored], read: Read) -> tuple[dict[str, Stored], dict[str, Packed]]:
    """The tensors as an unquantized checkpoint would have them, and the quantized ones among them."""
    packed: dict[str, Packed] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        weight, _, kind = name.partition(_STATE)
        if kind and weight in tensors:
            parts = {end: tensors[weight + end] for end in _PARTS if weight + end in tensors}
            packed[weight] = Packed(kind, tensors[weight], {**parts, _STATE: tensor})
            shapes[weight] = tuple(_state(tensor, read).shape)
        elif tensor.dtype.startswith("F8_"):
            scales = {end: tensors[name + end] for end in _SCALES if name + end in tensors}
            packed[name] = Packed("float8", tensor, dict(list(scales.items())[:1]))
            shapes[name] = tensor.shape
    used = {part.name for weight in packed.values() for part in weight.parts.values()}
    plain = {
        name: replace(tensor, shape=shapes[name], dtype="BF16") if name in packed else tensor
        for name, tensor in tensors.items()
        if name not in used
    }
    return plain, packed


def dequantized(packed: Packed, read: Read) -> np.ndarray:
    """The weight in float32."""
    try:
        return _four_bits(packed, read) if _STATE in packed.parts else _float8(packed, read)
    except (ValueError, IndexError, KeyError) as error:
        raise TrilloraError(
            f"The parts of the quantized {packed.weight.name} do not fit each other.",
            where=str(packed.weight.file),
            do=_DO,
        ) from error


def _four_bits(packed: Packed, read: Read) -> np.ndarray:
    state = _state(packed.parts[_STATE], read)
    codes = read(packed.weight).ravel()
    if math.prod(state.shape) > 2 * codes.size:
        raise ValueError("too few codes")
    absmax = read(packed.parts[".absmax"]).ravel()
    if ".nested_absmax" in packed.parts:
        factors = np.repeat(read(packed.parts[".nested_absmax"]).ravel(), state.nested_blocksize)[: absmax.size]
        absmax = read(packed.parts[".nested_quant_map"]).ravel()[absmax] * factors + np.float32(state.nested_offset)
    values = read(packed.parts[".quant_map"]).ravel().astype(np.float32)
    pairs = np.stack([values[codes >> 4], values[codes & 15]], axis=1).ravel()[: math.prod(state.shape)]
    factors = np.repeat(absmax.astype(np.float32), state.blocksize)[: pairs.size]
    return (pairs * factors).reshape(state.shape)


def _float8(packed: Packed, read: Read) -> np.ndarray:
    weight = read(packed.weight)
    for part in packed.parts.values():
        scale = read(part).astype(np.float32)
        scale = scale.reshape(-1, 1) if scale.ndim < 2 else scale
        rows, columns = (-(-size // count) for size, count in zip(weight.shape, scale.shape, strict=True))
        whole = np.repeat(np.repeat(scale, rows, axis=0), columns, axis=1)
        weight = weight * whole[: weight.shape[0], : weight.shape[1]]
    return weight


def _state(tensor: Stored, read: Read) -> _State:
    if math.prod(tensor.shape) > 1 << 16:
        raise TrilloraError("The description of a quantized weight is too long.", where=str(tensor.file), do=_DO)
    return parse_json(read(tensor).astype(np.uint8).tobytes(), _State, where=f"{tensor.file}, {tensor.name}", do=_DO)
