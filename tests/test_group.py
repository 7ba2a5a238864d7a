"""Several adapters trained together on one base: each ends as if it had been trained alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_run
from safetensors.numpy import load_file

from trillora.events import AdapterEnded, AdapterStep, Event
from trillora.recipe.load import load_recipe
from trillora.training.trainer import train

ROUNDING = 2e-4  # relative to the largest weight: float32 in another order, over a few steps of Adam
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_both(tmp_path_factory.mktemp("group"), num_rows=40)


def recipe(folder: Path, **sections: Any) -> dict[str, Any]:
    train = {"steps": STEPS, "learning_rate": 1e-2, "schedule": "cosine", "warmup_steps": 2, "batch_size": 4}
    values = tiny_run.recipe(folder, train={**train, **sections.pop("train", {})})
    values["data"]["split"] = {"validation": 0.2, "test": 0.1}
    values["evaluate"] = {"num_samples": 0, "every_steps": 3}
    return {**values, **sections}


def run(out: Path, values: dict[str, Any]) -> tuple[Path, list[Event]]:
    events: list[Event] = []
    train(load_recipe(values), out, listener=events.append)
    return out, events


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "adapter_model.safetensors")


def assert_close(one: Path, other: Path) -> None:
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, matrix in ours.items():
        assert matrix.shape == theirs[name].shape
        error = np.abs(matrix - theirs[name]).max()
        assert error <= ROUNDING * np.abs(theirs[name]).max(), (name, error)


def test_a_sweep_equals_single_runs(folder: Path, tmp_path: Path) -> None:
    """Learning rates, ranks and seeds: every adapter of the sweep equals a run of its own."""
    sweep = {"learning_rate": [1e-3, 1e-2], "rank": [2, 4], "keep": "all"}
    values = recipe(folder, sweep=sweep, lora={"rank": 4, "alpha": 8, "dropout": 0.1})
    together, events = run(tmp_path / "together", values)
    assert sum(isinstance(event, AdapterStep) for event in events) == 4 * STEPS
    for rate in sweep["learning_rate"]:
        for rank in sweep["rank"]:
            own = recipe(folder, train={"learning_rate": rate}, lora={"rank": rank, "alpha": 8, "dropout": 0.1})
            alone, _ = run(tmp_path / f"{rate}-{rank}", own)
            assert_close(together / "adapters" / f"rate-{rate:g}_rank-{rank}", alone / "adapter")
