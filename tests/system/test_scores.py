"""Whole runs of the real embedded model reach their scores: --tiny of the recipes. test_first_ten_minutes.py has the
quickstart.

Each run is a process with XLA's optimizations and without the settings of conftest.py. A threshold is below what was
measured on x86-64 and on ARM, and far above what the base or a guess has; `make recipes` trains all steps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_run
from dose import full_dose_only
from kept_variables import FILES

pytestmark = full_dose_only
RECIPES = Path(__file__).parents[2] / "recipes"
MINUTES = 30  # for a run, on a busy machine


def trillora(*words: str) -> str:
    environment = {name: os.environ[name] for name in (*FILES, "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-m", "trillora", *words],
        env={**environment, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60 * MINUTES,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr == ""
    return done.stdout


# Merged adapters are scored on test rows, which takes longer than the training: without these rows, that is left out.
NO_TEST_ROWS = tuple(f"phases.{n}.data.split.test=0" for n in range(4))
# recipe -> stages or phases, options that shorten --tiny, and the share of the loss on held-out rows that may be left
SHORTER: dict[str, tuple[int, tuple[str, ...], float]] = {
    "gemma-3-270m-chat": (1, ("train.steps=12",), 0.25),
    "qwen3-coder-phases": (4, ("train.steps=6", "train.warmup_steps=0", *NO_TEST_ROWS), 0.85),
    "romanian-mistral-7b": (2, ("train.steps=10",), 0.85),
    "sys-scan-mistral-7b": (1, ("train.steps=12",), 0.85),
}


@pytest.mark.parametrize("name", SHORTER)
def test_the_tiny_run_of_each_recipe_learns(name: str, tmp_path: Path, record_property: Any) -> None:
    """On rows that are not trained, in every stage or phase."""
    num_parts, options, limit = SHORTER[name]
    fewer = ("hardware.backend=cpu", "evaluate.max_documents=8", "evaluate.num_samples=0")
    run = tmp_path / "run"
    trillora("train", str(RECIPES / f"{name}.yaml"), "--tiny", *options, *fewer, "--out", str(run), "--json")
    losses: dict[str, list[float]] = {}
    for line in tiny_run.metrics(run):
        if line["kind"] == "evaluation":
            losses.setdefault(line["stage"], []).append(line["loss"])
    text = ", ".join(f"{stage} {found[0]:.2f} to {found[-1]:.2f}" for stage, found in losses.items())
    record_property(name, text)
    assert len(losses) == num_parts
    assert all(found[-1] < limit * found[0] for found in losses.values()), text
