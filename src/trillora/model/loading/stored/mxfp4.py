"""MXFP4, as gpt-oss stores its experts: 4-bit floats, and a power of two for every 32 of them.

    experts.gate_up_proj_blocks   uint8 [E, O, I / 32, 16]   two codes in a byte, the first in the low bits
    experts.gate_up_proj_scales   uint8 [E, O, I / 32]       exponent + 127
    -> experts.gate_up_proj       [E, I, O]

Legend: E experts, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from trillora.model.loading.stored.method import StoredMethod
from trillora.model.loading.stored.packed import Packed, Parts, Stored, plain

_BLOCKS, _SCALES = "_blocks", "_scales"
# E2M1 of the OCP Microscaling Formats specification: the highest bit is the sign.
_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float32)
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=-1)  # [256, 2]: the values of each byte
_BIAS = 127  # of the exponents


def pairs(codes: torch.Tensor) -> torch.Tensor:
    """The two values of each byte, next to each other in the last dim."""
    return _PAIRS[codes.view(torch.uint8).int()].flatten(-2)


class Mxfp4(Packed):
    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        codes, scales = parts[_BLOCKS][start:stop], parts[_SCALES][start:stop]
        values = torch.ldexp(pairs(codes), scales.int().unsqueeze(-1) - _BIAS)
        return values.flatten(-2).transpose(1, 2)


def find(tensors: Mapping[str, Stored], method: StoredMethod | None) -> dict[str, Stored]:
    """The weights in this format, by the names that they have in an unquantized checkpoint."""
    found = {}
    for name, blocks in tensors.items():
        weight = name.removesuffix(_BLOCKS)
        scales = tensors.get(weight + _SCALES)
        if weight != name and scales is not None and blocks.dtype == scales.dtype == "U8" and len(blocks.shape) == 4:
            experts, outputs, groups, num_bytes = blocks.shape
            shape = (experts, groups * num_bytes * 2, outputs)
            found[weight] = plain(weight, shape, Mxfp4("MXFP4", {_BLOCKS: blocks, _SCALES: scales}))
    return found
