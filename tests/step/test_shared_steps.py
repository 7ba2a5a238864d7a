"""Runs share a compiled step only if nothing that the step is built from differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest
import tiny_run
from dose import full_dose_only
from shared_steps import sharing, step_key

from trillora.devices.mesh import MeshShape, make_mesh
from trillora.recipe.load import load_recipe
from trillora.recipe.schema import stages_of
from trillora.training.trainer import train


def key(num_layers: int = 2, devices: int = 1, num_steps: int = 4, settings: str = "", **sections: Any) -> Any:
    (stage,) = stages_of(load_recipe(tiny_run.recipe(Path("x"), **sections)))
    mesh = make_mesh(jax.devices()[:devices], MeshShape(data=devices))
    return step_key(stage.recipe, settings, tiny_run.llama(num_layers), mesh, num_steps)


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 3},
        {"devices": 2},
        {"settings": "remat"},
        {"train": {"learning_rate": 1e-3}},
        {"train": {"optimizer": "lion"}},
        {"train": {"batch_size": 4}},
        {"lora": {"rank": 8}},
        {"lora": {"dropout": 0.1}},
        {"data": {"pack": False}},
        {"engine": {"remat": "full"}},
    ],
    ids=str,
)
def test_another_step_has_another_key(change: dict[str, Any]) -> None:
    assert key(**change) != key()


@pytest.mark.parametrize(
    "change",
    [
        {"train": {"seed": 5}},
        {"train": {"checkpoint_every": 2}},
        {"data": {"path": "y"}},
        {"data": {"chat_template": "zephyr"}},
        {"train": {"steps": 5}, "num_steps": 5},
    ],
    ids=str,
)
def test_where_files_are_and_when_to_save_changes_no_step(change: dict[str, Any]) -> None:
    assert key(**change) == key()


def test_a_rate_that_falls_has_the_number_of_steps_in_its_step() -> None:
    for schedule in ("cosine", "linear", "wsd"):
        assert key(train={"schedule": schedule}) != key(train={"schedule": schedule}, num_steps=5)


@full_dose_only
def test_runs_that_share_their_step_equal_a_run_that_does_not(tmp_path: Path) -> None:
    folder = tiny_run.write_both(tmp_path, tiny_run.llama(num_layers=1, width=32))

    def losses(name: str, **options: Any) -> tuple[float, ...]:
        return train(load_recipe(tiny_run.recipe(folder, train=options)), tmp_path / name).losses

    alone = losses("alone")
    with sharing() as shared:
        assert losses("first") == alone
        num_shared = len(shared)
        assert losses("second", checkpoint_every=2) == alone and len(shared) == num_shared > 3
        assert losses("other", learning_rate=1e-3)[2] != alone[2] and len(shared) > num_shared
