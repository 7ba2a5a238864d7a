"""Adapters of random matrices as folders, without a model, and merges of them that must be refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trillora.adapters.merge import merge_adapters
from trillora.errors import Bug, TrilloraError
from trillora.files.checksums import with_checksums
from trillora.model.adapters import peft_files
from trillora.recipe.group_section import MergeOptions

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": "some/base"}


def write(folder: Path, matrices: dict[str, np.ndarray], config: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, data in with_checksums(0, peft_files(matrices, config)).items():
        (folder / name).write_bytes(data)
    return folder


def small(folder: Path, seed: int, num_out: int = 6, **changes: Any) -> Path:
    generator = np.random.default_rng(seed)
    shapes = {"q.lora_a": (2, 5), "q.lora_b": (num_out, 2)}
    matrices = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    return write(folder, matrices, {**CONFIG, **changes})


def refusal(folder: Path, adapters: Sequence[Path | str], options: MergeOptions | None = None) -> TrilloraError:
    """The error of a merge that must leave nothing behind."""
    before = sorted(folder.iterdir())
    with pytest.raises(TrilloraError) as caught:
        merge_adapters(adapters, options or MergeOptions(), folder / "out")
    assert not isinstance(caught.value, Bug) and caught.value.do
    assert sorted(folder.iterdir()) == before
    return caught.value
