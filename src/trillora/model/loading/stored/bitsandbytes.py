"""Weights of bitsandbytes, in 4 bits (nf4, fp4) and in 8.

    q_proj.weight                                   uint8 [n / 2, 1]: two codes in a byte, the first in the high bits
    q_proj.weight.quant_map                         float32 [16]: the value of each code
    q_proj.weight.absmax                            one factor per block; uint8 codes if they are quantized too, with
    q_proj.weight.nested_quant_map, .nested_absmax  their values, and one factor per block of them
    q_proj.weight.quant_state.bitsandbytes__nf4     JSON in uint8: shape, block sizes, nested_offset, dtype

    q_proj.weight                                   int8 [O, I]
    q_proj.SCB                                      float32 [O]: the largest weight of each output, code 127

Legend: O outputs, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, Field

from trillora.engine.quantize import BLOCK, DYNAMIC, GROUP, NF4
from trillora.errors import TrilloraError
from trillora.files.read_json import parse_json
from trillora.model.loading.stored.method import StoredMethod
from trillora.model.loading.stored.packed import Packed, Parts, Stored, fitting_parts, plain
from trillora.model.loading.tensor_files import opened

_STATE = ".quant_state.bitsandbytes__"
_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_WEIGHT, _SCALE, _LAYOUT = "weight", "SCB", "weight_format"
_MAX_STATE = 1 << 16  # bytes
_MOST_CODES = 16  # in one element, of 8 bytes
_ONE_127TH = 7.874015718698502e-3  # as bitsandbytes writes it: the last bit of a product depends on it
Size = Annotated[int, Field(ge=1, le=1 << 40)]


class _State(BaseModel):
    """bitsandbytes' description of a weight."""

    shape: Annotated[list[Size], Field(min_length=1, max_length=4)]
    blocksize: Size
    nested_blocksize: Size = 256
    nested_offset: float = 0.0
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


@dataclass(frozen=True)
class FourBits(Packed):
    state: _State

    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        shape, size = self.state.shape, self.state.blocksize
        width = math.prod(shape[1:])
        first, last = start * width, stop * width
        codes = _bytes(parts[_WEIGHT])[first // 2 : -(-last // 2)]
        table = parts[".quant_map"].reshape(16).to(torch.float32)
        pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], dim=-1)  # the values of each byte
        values = pairs[codes.int()].reshape(-1)
        values = values[first % 2 : first % 2 + last - first]
        blocks = slice(first // size, -(-last // size))
        scales = self._absmax(parts, blocks).repeat_interleave(size)
        values = values * scales[first % size : first % size + last - first]
        # bitsandbytes returns the type that the weight had before it was quantized.
        return values.to(getattr(torch, self.state.dtype)).to(torch.float32).reshape(stop - start, *shape[1:])

    def _absmax(self, parts: Parts, blocks: slice) -> torch.Tensor:
        absmax = parts[".absmax"].reshape(-1)[blocks]
        if ".nested_absmax" not in parts:
            return absmax.to(torch.float32)
        groups = torch.arange(blocks.start, blocks.start + len(absmax)) // self.state.nested_blocksize
        codes = parts[".nested_quant_map"].reshape(-1)[absmax.int()]
        return codes * parts[".nested_absmax"].reshape(-1)[groups] + torch.tensor(self.state.nested_offset)

    def codes(self, parts: Parts, format: str) -> dict[str, torch.Tensor] | None:
        """Our nf4 has the same numbers. Only the order of the codes in a block differs: a byte has the codes i and
        i + 32 there, and 2i and 2i + 1 here."""
        state = self.state
        sizes = len(state.shape) == 2 and state.shape[1] % BLOCK == 0 and state.blocksize == BLOCK
        if format != "nf4" or not sizes or state.nested_blocksize != GROUP or ".nested_absmax" not in parts:
            return None
        tables = ((parts[".quant_map"], NF4), (parts[".nested_quant_map"], DYNAMIC))
        # Evenly spaced numbers differ in the last bit, depending on the library that made the table.
        if not all(_is_close(own.reshape(-1).float(), torch.tensor(table)) for own, table in tables):
            return None
        pairs = _bytes(parts[_WEIGHT]).reshape(-1, BLOCK // 2)
        codes = torch.stack([pairs >> 4, pairs & 15], dim=-1).reshape(-1, BLOCK)
        packed = codes[:, : BLOCK // 2] << 4 | codes[:, BLOCK // 2 :]
        return {
            "q": packed.reshape(state.shape[0], -1),
            "absmax": parts[".absmax"].reshape(state.shape[0], -1),
            "absmax_scale": parts[".nested_absmax"].reshape(-1),
            "absmax_mean": torch.tensor(state.nested_offset),
        }


class EightBits(Packed):
    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        scales = parts[_SCALE].reshape(-1, 1)
        if len(scales) != len(parts[_WEIGHT]):
            raise ValueError("one scale per output is needed")
        return parts[_WEIGHT][start:stop].to(torch.float32) * scales[start:stop].to(torch.float32) * _ONE_127TH

    def codes(self, parts: Parts, format: str) -> dict[str, torch.Tensor] | None:
        if format != "int8":
            return None
        return {"q": parts[_WEIGHT], "scale": parts[_SCALE].reshape(-1).to(torch.float32) * _ONE_127TH}


def _is_close(own: torch.Tensor, table: torch.Tensor) -> bool:
    return own.shape == table.shape and torch.allclose(own, table, rtol=5e-7, atol=0)


def _bytes(codes: torch.Tensor) -> torch.Tensor:
    """The codes may be stored as any type (bnb_4bit_quant_storage)."""
    return codes.contiguous().reshape(-1).view(torch.uint8)


def find(tensors: Mapping[str, Stored], method: StoredMethod | None) -> dict[str, Stored]:
    """The weights in these formats, by name."""
    found = {}
    for name, tensor in tensors.items():
        weight, _, kind = name.partition(_STATE)
        layer = name.removesuffix(_SCALE)
        if kind and weight in tensors:
            parts = {end: tensors[weight + end] for end in _PARTS if weight + end in tensors}
            state = _state(tensor)
            packed = FourBits(kind, {_WEIGHT: tensors[weight], **parts, _STATE: tensor}, state)
            found[weight] = plain(weight, tuple(state.shape), packed)
            with fitting_parts(found[weight]):
                if math.prod(state.shape) > _MOST_CODES * math.prod(tensors[weight].shape):
                    raise ValueError("too few codes")
        elif layer != name and (own := tensors.get(layer + _WEIGHT)) and own.dtype == "I8" and len(own.shape) == 2:
            parts = {_WEIGHT: own, _SCALE: tensor}
            if layout := tensors.get(layer + _LAYOUT):
                _check_layout(layout)
                parts[_LAYOUT] = layout
            found[own.name] = plain(own.name, own.shape, EightBits("int8", parts))
    return found


def _state(tensor: Stored) -> _State:
    do = "download the file again, or use the unquantized version of the model"
    if math.prod(tensor.shape) > _MAX_STATE or tensor.dtype != "U8":
        raise TrilloraError("The description of a quantized weight is too long.", where=str(tensor.file), do=do)
    with opened(tensor.file) as file:
        text = bytes(file.get_tensor(tensor.name).numpy())
    return parse_json(text, _State, where=f"{tensor.file}, {tensor.name}", do=do)


def _check_layout(tensor: Stored) -> None:
    """0 is row by row. The others are for the tensor cores of old GPUs."""
    with opened(tensor.file) as file:
        layout = int(file.get_tensor(tensor.name).reshape(-1)[0]) if math.prod(tensor.shape) == 1 else -1
    if layout != 0:
        raise TrilloraError(
            "The int8 weights are stored in the order of a GPU's tensor cores.",
            where=f"{tensor.file}, {tensor.name} = {layout}",
            do="save the model again with bitsandbytes 0.45 or newer, or use its unquantized version",
        )
