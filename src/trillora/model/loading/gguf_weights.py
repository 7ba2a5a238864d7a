"""Reads a small GGUF model file quickly: its fields, and its tensors in float32.

    model = GgufModel(file)
    model.fields["llama.block_count"]       # 30
    model.tensor("blk.0.attn_q.weight")     # float32 [576, 576], dequantized

transformers reads GGUF too, but parses the 98,000 strings of the tokenizer three times: converting the embedded model
took 34.6 s of CPU time with it, and takes 4.4 s with this. Only the formats of that model are read; any other file is
refused. The file comes with an installed package, so it is trusted. `certify/gguf_file.py` reads files of users.

The layout: magic, version, number of tensors and of fields; the fields (name, type, value); for each tensor its name,
shape (fastest dimension first), format and offset; the data of all tensors, aligned to 32 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillora.errors import TrilloraError

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of struct
TEXT, LIST = 8, 9
BLOCK = 32  # values that share a scale


@dataclass(frozen=True)
class _Place:
    """Where a tensor is in the file."""

    shape: tuple[int, ...]  # as in PyTorch: slowest dimension first
    format: int
    start: int  # byte


class GgufModel:
    """An open file. Tensors are read from disk when they are asked for."""

    def __init__(self, file: Path) -> None:
        self._bytes = np.memmap(file, np.uint8, mode="r")
        cursor = _Cursor(self._bytes.data)
        magic, version = bytes(cursor.take(4)), cursor.number("I")
        if magic != MAGIC or version != VERSION:
            raise _refused(f"a GGUF file of version {VERSION} was expected", file)
        num_tensors, num_fields = cursor.number("Q"), cursor.number("Q")
        self.fields: dict[str, Any] = {cursor.text(): cursor.value(cursor.number("I")) for _ in range(num_fields)}
        places = {cursor.text(): _place(cursor) for _ in range(num_tensors)}
        start = cursor.at + -cursor.at % ALIGNMENT
        self._places = {name: _Place(p.shape, p.format, start + p.start) for name, p in places.items()}
        unknown = {place.format for place in places.values()} - set(FORMATS)
        if unknown or self.fields.get("general.alignment", ALIGNMENT) != ALIGNMENT:
            raise _refused(f"it has tensors in the formats {sorted(unknown)}", file)

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def tensor(self, name: str) -> np.ndarray:
        """In float32, in the shape that PyTorch uses."""
        place = self._places[name]
        block_bytes, dequantize = FORMATS[place.format]
        num_blocks = int(np.prod(place.shape)) // BLOCK
        data = self._bytes[place.start : place.start + num_blocks * block_bytes]
        return dequantize(data.reshape(num_blocks, block_bytes)).reshape(place.shape)


class _Cursor:
    """Reads the header from its first byte to its last."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.at = data, 0

    def take(self, size: int) -> memoryview:
        self.at += size
        return self._data[self.at - size : self.at]

    def number(self, code: str) -> Any:
        format = f"<{code}"
        return struct.unpack(format, self.take(struct.calcsize(format)))[0]

    def text(self) -> str:
        return str(self.take(self.number("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            each, length = self.number("I"), self.number("Q")
            return [self.value(each) for _ in range(length)]
        return self.number(NUMBERS[kind])


def _place(cursor: _Cursor) -> _Place:
    dims = [cursor.number("Q") for _ in range(cursor.number("I"))]
    return _Place(tuple(reversed(dims)), cursor.number("I"), cursor.number("Q"))


def _float32(blocks: np.ndarray) -> np.ndarray:
    return blocks.view(np.float32)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """A scale and a minimum in float16, and 32 values of 4 bits: the first 16 are the low halves of the bytes."""
    scale, minimum = (blocks[:, i : i + 2].view(np.float16).astype(np.float32) for i in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale * codes.astype(np.float32) + minimum


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """A scale in float16, and 32 signed bytes."""
    return blocks[:, :2].view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)


# By GGUF's number of a format: bytes of a block, and its values.
FORMATS: dict[int, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    0: (4 * BLOCK, _float32),
    3: (4 + BLOCK // 2, _q4_1),
    8: (2 + BLOCK, _q8_0),
}


def _refused(why: str, file: Path) -> TrilloraError:
    what = f"This GGUF file is not one that the embedded model can be read from: {why}."
    return TrilloraError(what, where=str(file), do="install the version of its package that is in pyproject.toml")
