"""Integers with scales and zero points for groups of inputs: GPTQ, AWQ and compressed-tensors.

    method               codes                          zero points                     scales        weight[o, i]
    gptq                 qweight int32 [I / 8, O]       qzeros int32 [I / G, O / 8]     [I / G, O]    (q - z) * s
    awq                  qweight int32 [I, O / 8]       qzeros int32 [I / G, O / 8]     [I / G, O]    (q - z) * s
    compressed-tensors   weight_packed int32 [O, I / 8] weight_zero_point [O / 8, I / G] [O, I / G]   (q - 8 - z) * s

An int32 holds 8 codes of 4 bits, the first in the lowest bits; AWQ stores them in the order 0, 2, 4, 6, 1, 3, 5, 7.
Products have the type of the scales, as in the libraries that write these formats.

Legend: O outputs, I inputs, G inputs of a group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from trillora.errors import TrilloraError
from trillora.model.loading.stored.method import StoredMethod
from trillora.model.loading.stored.packed import Packed, Parts, Stored, plain
from trillora.model.loading.tensor_files import opened

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where AWQ stores output 0, 1, … of eight
_GPTQ = ("qweight", "qzeros", "scales", "g_idx")
_COMPRESSED = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")


@dataclass(frozen=True)
class Gptq(Packed):
    bits: int
    zeros_are_less_by_one: bool

    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        codes_IO = unpack(parts["qweight"][:, start:stop], self.bits, dim=0)
        zeros = unpack(parts["qzeros"], self.bits, dim=1)[:, start:stop]
        if self.zeros_are_less_by_one:
            zeros = (zeros + 1) & (2**self.bits - 1)
        scales = parts["scales"][:, start:stop]
        groups_I = _groups(parts.get("g_idx"), len(codes_IO), len(scales))
        return _product(codes_IO - zeros[groups_I], scales[groups_I]).T


class Awq(Packed):
    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        columns = slice(start // 8, -(-stop // 8))
        inside = slice(start % 8, start % 8 + stop - start)
        codes_IO, zeros = (_in_order(parts[name][:, columns])[:, inside] for name in ("qweight", "qzeros"))
        scales = parts["scales"][:, start:stop]
        groups_I = _groups(None, len(codes_IO), len(scales))
        return _product(codes_IO - zeros[groups_I], scales[groups_I]).T


@dataclass(frozen=True)
class Compressed(Packed):
    bits: int
    num_inputs: int

    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        half = 2 ** (self.bits - 1)
        codes_OI = unpack(parts["weight_packed"][start:stop], self.bits, dim=1)[:, : self.num_inputs] - half
        scales = parts["weight_scale"].reshape(len(parts["weight_packed"]), -1)[start:stop]
        groups_I = _groups(parts.get("weight_g_idx"), self.num_inputs, scales.shape[1])
        if "weight_zero_point" in parts:
            zeros = unpack(parts["weight_zero_point"], self.bits, dim=0)[start:stop] - half
            codes_OI = codes_OI - zeros[:, groups_I]
        return _product(codes_OI, scales[:, groups_I])


def unpack(packed: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """The codes [a, b] of int32 numbers that hold several along `dim`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    codes = packed.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts)
    return (codes & (2**bits - 1)).flatten(dim, dim + 1)


def _in_order(packed: torch.Tensor) -> torch.Tensor:
    return unpack(packed, 4, dim=1).reshape(len(packed), -1, 8)[..., _PLACES].flatten(1)


def _groups(given: torch.Tensor | None, num_inputs: int, num_groups: int) -> torch.Tensor:
    """The group of each input."""
    if given is not None and given.numel():
        groups = given.reshape(-1).long()
        if len(groups) != num_inputs or (groups < 0).any():
            raise ValueError("one group per input is needed")
        return groups
    if not num_groups or num_inputs % num_groups:
        raise ValueError(f"{num_inputs} inputs cannot be split into {num_groups} groups")
    return torch.arange(num_inputs) // (num_inputs // num_groups)


def _product(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return (codes.to(torch.float32) * scales.to(torch.float32)).to(scales.dtype).to(torch.float32)


def find(tensors: Mapping[str, Stored], method: StoredMethod | None) -> dict[str, Stored]:
    """The weights in these formats, by the names that they have in an unquantized checkpoint."""
    if method is None or method.name not in ("gptq", "awq", "compressed-tensors"):
        return {}
    names, first = (_COMPRESSED, "weight_packed") if method.name == "compressed-tensors" else (_GPTQ, "qweight")
    found = {}
    for name, codes in tensors.items():
        layer = name.removesuffix(first)
        if layer == name or codes.dtype != "I32" or len(codes.shape) != 2:
            continue
        parts = {end: tensors[layer + end] for end in names if layer + end in tensors}
        found[f"{layer}weight"] = _weight(f"{layer}weight", codes, parts, method)
    if method.name == "awq":
        _check_scales(tensors)
    return found


def _weight(name: str, codes: Stored, parts: dict[str, Stored], method: StoredMethod) -> Stored:
    rows, columns = codes.shape
    if method.name == "gptq":
        packed: Packed = Gptq(method.label, parts, method.bits, method.zeros_are_less_by_one)
        return plain(name, (columns, rows * 32 // method.bits), packed)
    if method.name == "awq":
        return plain(name, (columns * 8, rows), Awq(method.label, parts))
    shape = _shape(parts.get("weight_shape"))
    # The width of a code follows from the shape: 4 bits fill an eighth of an int32, 8 bits a quarter.
    bits = next((bits for bits in (4, 8) if shape and -(-shape[1] * bits // 32) == columns), None)
    if shape is None or bits is None or shape[0] != rows:
        raise TrilloraError(
            f"The shape of the quantized {name} is missing or wrong.",
            where=str(codes.file),
            do="download the file again, or use the unquantized version of the model",
        )
    return plain(name, shape, Compressed(f"int{bits}", parts, bits, shape[1]))


def _shape(tensor: Stored | None) -> tuple[int, int] | None:
    if tensor is None or math.prod(tensor.shape) != 2:
        return None
    with opened(tensor.file) as file:
        outputs, inputs = map(int, file.get_tensor(tensor.name).reshape(-1))
    return outputs, inputs


def _check_scales(tensors: Mapping[str, Stored]) -> None:
    """AWQ multiplies the activations of some models (Falcon, Bloom, …) by scales that transformers' classes lack."""
    for name, tensor in tensors.items():
        if name.endswith(".scales") and f"{name.removesuffix('scales')}qweight" not in tensors:
            raise TrilloraError(
                f"The checkpoint scales activations ({name}), which this model cannot do.",
                where=str(tensor.file),
                do="use the unquantized (bfloat16) version of the model",
            )
