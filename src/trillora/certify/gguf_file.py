"""Reads a GGUF file: its fields, and its tensors one at a time.

    model = open_gguf(file)
    model.text("general.architecture")     # "llama"
    model.tensor("blk.0.attn_q.weight")    # float32 [576, 576], dequantized

A truncated or damaged file is an error that names it.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from trillora.errors import TrilloraError
from trillora.locks.extras import install_command

MAGIC = b"GGUF"
DO = "export it again, or copy the file again"
_BAD_FILE = (ValueError, IndexError, KeyError, OverflowError, TypeError, AssertionError)  # of the gguf library


class GgufFile:
    """An open file. `types` are the storage types of its tensors, such as F16 or Q8_0."""

    def __init__(self, file: Path, reader: Any) -> None:
        self.file, self._reader = file, reader
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self.types = {name: str(tensor.tensor_type.name) for name, tensor in self._tensors.items()}

    def value(self, key: str) -> Any:
        """A field of the header: a number, a text or a list; None if it is missing."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def text(self, key: str) -> str | None:
        value = self.value(key)
        return value if isinstance(value, str) else None

    def tensor(self, name: str) -> np.ndarray:
        """In float32, in the shape that PyTorch uses."""
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        return dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False).reshape(self.shape(name))

    def type(self, name: str) -> Any:
        """gguf's GGMLQuantizationType of a tensor."""
        return self._tensors[name].tensor_type

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def rows(self, name: str, rows: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Some rows of a tensor: their bytes, and their values in float32."""
        from gguf.quants import dequantize

        data, kind = self._tensors[name].data, self._tensors[name].tensor_type
        num_rows = max(1, int(np.prod(self.shape(name), dtype=np.int64)) // width)
        chosen = np.ascontiguousarray(data.reshape(num_rows, -1)[rows])
        return chosen.view(np.uint8), dequantize(chosen, kind).astype(np.float32, copy=False).reshape(len(rows), width)

    def header(self) -> dict[str, Any]:
        """All fields but those about the file itself."""
        return {key: field.contents() for key, field in self._reader.fields.items() if not key.startswith("GGUF.")}

    @property
    def end(self) -> int:
        """The number of bytes up to the end of the last tensor."""
        return max((int(tensor.data_offset) + int(tensor.n_bytes) for tensor in self._reader.tensors), default=0)


def open_gguf(file: Path) -> GgufFile:
    if importlib.util.find_spec("gguf") is None:
        raise TrilloraError("Reading GGUF files needs the package gguf.", do=install_command("certify"))
    from gguf import GGUFReader

    if not file.is_file():  # opening a pipe would wait for ever
        raise TrilloraError("This is not a file.", where=str(file), do=DO)
    try:
        with open(file, "rb") as stream:
            if stream.read(4) != MAGIC:
                raise ValueError("it does not start with GGUF")
        found = GgufFile(file, GGUFReader(str(file)))
        if found.end > file.stat().st_size:
            raise ValueError(f"its tensors end at byte {found.end:,}, but it has {file.stat().st_size:,} bytes")
        return found
    except OSError as error:
        raise TrilloraError(f"This file cannot be read: {error.strerror}.", where=str(file), do=DO) from error
    except _BAD_FILE as error:
        what = f"This GGUF file is damaged or incomplete: {error}."
        raise TrilloraError(what, where=str(file), do=DO) from error


def is_adapter(file: Path) -> bool:
    """Whether the file holds a LoRA adapter. A file that cannot be read counts as a model; its check says why."""
    try:
        return open_gguf(file).text("general.type") == "adapter"
    except TrilloraError:
        return False
