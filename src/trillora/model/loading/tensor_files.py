"""Opens safetensors files; a damaged one is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from safetensors import SafetensorError, safe_open

from trillora.errors import TrilloraError


@contextmanager
def opened(file: Path, framework: Literal["pt", "np"] = "pt") -> Iterator[safe_open]:
    try:
        with safe_open(str(file), framework=framework) as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise TrilloraError(
            f"This weight file is damaged or incomplete: {error}",
            where=f"{file} ({file.stat().st_size} bytes)" if file.exists() else str(file),
            do="download it again; compare its size with the size on the model's page",
        ) from error


def stored_shapes(files: Iterable[Path]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor by name. Reads only the headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with opened(file, "np") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes
