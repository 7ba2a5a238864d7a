"""A tensor of a checkpoint, which may be stored quantized: then it is computed, a few rows at a time, when it is read.

    q_proj.weight          Stored(shape=(4096, 4096), dtype="BF16")                  as it is in the file
    experts.gate_up_proj   Stored(shape=(32, 2880, 5760), dtype="BF16", packed=…)    computed from
                             experts.gate_up_proj_blocks, experts.gate_up_proj_scales

So names and shapes are as in the unquantized model, and the rest of the code needs no other case.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trillora.errors import TrilloraError
from trillora.model.loading.tensor_files import opened

Index = tuple[slice, ...]
ReadSlice = Callable[[Index], torch.Tensor]
Parts = Mapping[str, torch.Tensor]
PIECE = 16 << 20  # weights that are dequantized at once: 64 MB in float32


@dataclass(frozen=True)
class Stored:
    """A tensor of a checkpoint."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    packed: Packed | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Packed(ABC):
    """A quantized weight: the tensors that it is stored as, and how its values follow from them."""

    format: str  # for people
    parts: Mapping[str, Stored]

    @abstractmethod
    def rows(self, parts: Parts, start: int, stop: int) -> torch.Tensor:
        """The weight from `start` to before `stop` of its first dim, in float32."""

    def codes(self, parts: Parts, format: str) -> dict[str, torch.Tensor] | None:
        """The weight in a format of `engine.quantize`, if that loses nothing: the same codes. Else None."""
        return None

    @contextmanager
    def opened(self) -> Iterator[dict[str, torch.Tensor]]:
        """The parts, mapped from their files."""
        with ExitStack() as stack:
            files = {file: stack.enter_context(opened(file)) for file in {part.file for part in self.parts.values()}}
            yield {key: files[part.file].get_tensor(part.name) for key, part in self.parts.items()}


def plain(name: str, shape: tuple[int, ...], packed: Packed) -> Stored:
    """A quantized weight as the tensor that an unquantized checkpoint would have."""
    first = next(iter(packed.parts.values()))
    return replace(first, name=name, shape=shape, dtype="BF16", packed=packed)


@contextmanager
def opened_tensor(tensor: Stored, dtype: torch.dtype) -> Iterator[ReadSlice]:
    """Yields a function that reads any slice. The file is mapped only meanwhile, to free its pages. A quantized tensor
    is returned in `dtype`, any other one in its own type."""
    packed = tensor.packed
    if packed is not None:
        with packed.opened() as parts:
            yield lambda index: _dequantized(tensor, packed, parts, index, dtype)
        return
    with opened(tensor.file) as file:
        if tensor.shape:
            head: Any = file.get_slice(tensor.name)
            yield lambda index: head[index] if index else file.get_tensor(tensor.name)
        else:
            yield lambda index: file.get_tensor(tensor.name)


def _dequantized(tensor: Stored, packed: Packed, parts: Parts, index: Index, dtype: torch.dtype) -> torch.Tensor:
    rows, *others = index or (slice(None),)
    start, stop, _ = rows.indices(tensor.shape[0])
    sizes = [len(range(*part.indices(size))) for part, size in zip(others, tensor.shape[1:], strict=False)]
    step = max(1, PIECE // max(1, math.prod(tensor.shape[1:])))
    found = torch.empty((stop - start, *sizes, *tensor.shape[1 + len(sizes) :]), dtype=dtype)
    with fitting_parts(tensor):
        for first in range(start, stop, step):
            last = min(first + step, stop)
            values = packed.rows(parts, first, last)
            if values.shape != (last - first, *tensor.shape[1:]):
                raise ValueError(f"{list(values.shape)} instead of {[last - first, *tensor.shape[1:]]}")
            found[first - start : last - start] = values[(slice(None), *others)]
    return found


class WrongScale(ValueError):
    """A scale of a quantized weight is no positive number of a sensible size. The text is its value."""


@contextmanager
def fitting_parts(tensor: Stored) -> Iterator[None]:
    """Operations on parts of wrong shapes raise several exceptions."""
    try:
        yield
    except WrongScale as error:
        raise TrilloraError(
            f"A scale of the quantized {tensor.name} is {error}, which gives no usable weights.",
            where=str(tensor.file),
            do="download the file again, or use the unquantized version of the model",
        ) from error
    except (ValueError, TypeError, IndexError, KeyError, RuntimeError) as error:
        raise TrilloraError(
            f"The parts of the quantized {tensor.name} do not fit each other.",
            where=str(tensor.file),
            do="download the file again, or use the unquantized version of the model",
        ) from error
