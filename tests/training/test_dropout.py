"""LoRA dropout: the masks depend on the seed, the step, the layer and the sequence, never on how the batch is split.

The reference is one device that takes the batch of 8 sequences whole. The other runs split the same batch into
micro-batches, over devices, or both.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from dose import FULL, slow_case

from trillora.model.adapters import load_adapter
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

pytestmark = pytest.mark.core

NUM_LAYERS = 2 if FULL else 1  # test_lora.py always has the masks of several layers
LOSS = 1e-5  # relative: float32 sums are taken in another order
SPLITS: dict[str, tuple[int, dict[str, int]]] = {
    "micro-batches of 1": (1, {}),
    "micro-batches of 2": (2, {}),
    "micro-batches of 4": (4, {}),
    "2 devices, fsdp 2": (8, {"fsdp": 2}),
    "4 devices, data 2 x tensor 2, micro-batches of 4": (4, {"data": 2, "tensor": 2}),
    "8 devices, data 8": (8, {"data": 8}),
    "8 devices, data 2 x fsdp 2 x tensor 2, micro-batches of 4": (4, {"data": 2, "fsdp": 2, "tensor": 2}),
}
# Rows and matrices over devices, together with micro-batches.
MAIN = ("4 devices, data 2 x tensor 2, micro-batches of 4",)


def run(folder: Path, out: Path, micro_batch_size: int, mesh: dict[str, int], dropout: float = 0.1) -> tuple[Any, Any]:
    """Losses of three steps and the adapter they end with: the third depends on the gradients of both matrices."""
    settings = tiny_run.recipe(
        folder,
        lora={"dropout": dropout},
        train={"steps": 3, "micro_batch_size": micro_batch_size},
        hardware={"devices": math.prod(mesh.values()), "mesh": mesh or "auto"},
    )
    losses = train(load_recipe(settings), out).losses
    return losses, load_adapter(out / "adapter")[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("tiny"), tiny_run.wide_llama(NUM_LAYERS))


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[Any, Any]:
    return run(folder, folder / "whole", 8, {})


@pytest.mark.parametrize("split", [split if split in MAIN else slow_case(split) for split in SPLITS])
def test_the_split_of_a_batch_does_not_change_the_numbers(
    folder: Path, whole: tuple[Any, Any], tmp_path: Path, split: str
) -> None:
    losses, adapter = run(folder, tmp_path / "run", *SPLITS[split])
    assert len(losses) == 3 and losses == pytest.approx(whole[0], rel=LOSS)
    # Adam divides small gradients by small roots, which magnifies rounding in single weights: compare whole matrices.
    off = [np.linalg.norm(adapter[key] - array) / np.linalg.norm(array) for key, array in whole[1].items()]
    assert len(off) == NUM_LAYERS * 7 * 2 and max(off) < 1e-3


def test_dropout_changes_the_numbers(folder: Path, whole: tuple[Any, Any], tmp_path: Path) -> None:
    """The control: without an effect of the masks, the test above would prove nothing."""
    losses, _ = run(folder, tmp_path / "run", 8, {}, dropout=0.0)
    assert abs(losses[-1] - whole[0][-1]) > 100 * LOSS * losses[-1]
