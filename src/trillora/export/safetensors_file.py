"""Writes a safetensors file piece by piece: sizes are known before values, so no tensor is held as a whole.

    write_tensors(path, [PlannedTensor("model.norm.weight", "BF16", (576,))], pieces)

where `pieces(tensor)` yields arrays whose bytes, joined, are the tensor's. The file starts with the length of its
header in 8 bytes and the header, JSON with the type, shape and place of each tensor. The values follow in that order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trillora.errors import Bug

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the file."""

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * SIZES.get(self.dtype, 1)  # float8 types have one byte


def write_tensors(
    path: Path, tensors: Sequence[PlannedTensor], pieces: Callable[[PlannedTensor], Iterable[np.ndarray]]
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for tensor in tensors:
        end = place + tensor.num_bytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # values start at a multiple of 8 bytes
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            written = sum(file.write(np.ascontiguousarray(piece).data) for piece in pieces(tensor))
            if written != tensor.num_bytes:
                raise Bug(
                    f"{tensor.name} has {written} bytes instead of {tensor.num_bytes}.",
                    do="report it to the developers of Trillora; nothing was written",
                )
