"""The losses of tiny fixed recipes are those recorded in tests/golden, and a resumed run is bit-identical, with XLA's
optimizations as in a real run. tools/golden.py has the recipes and records the losses (`--write`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dose import full_dose_only
from run_process import WAIT

from trillora.devices.chips import has_accelerator

GOLDEN = Path(__file__).parents[1] / "golden"
TOOL = Path(__file__).parents[2] / "tools" / "golden.py"
# Relative. On a CPU the order of float32 additions depends on the vector width and the number of threads. A GPU also
# multiplies in TF32, in kernels that are chosen by timing: CPU and H200 differ by up to 2e-4.
TOLERANCES = {"cpu": 1e-5, "gpu": 1e-3}


RECIPES = ("stages", "experts")  # the first is also the run that is resumed


def measure(backend: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if backend == "gpu":
        environment.pop("JAX_PLATFORMS", None)
    done = subprocess.run(
        [sys.executable, str(TOOL), "--backend", backend, "--recipes", *RECIPES],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check_losses(found: dict[str, Any], recorded_on: str) -> None:
    recorded = json.loads((GOLDEN / f"{recorded_on}.json").read_text("utf-8"))["losses"]
    assert len(recorded) == 2 and tuple(found["losses"]) == RECIPES
    for name in RECIPES:
        losses = recorded[name]
        assert found["losses"][name] == pytest.approx(losses, rel=TOLERANCES[recorded_on[:3]]), name
        assert len(losses) >= 8 and losses[-1] < 0.97 * losses[0], "the run learns"


@pytest.fixture(scope="module")
def on_cpu() -> dict[str, Any]:
    return measure("cpu")


@full_dose_only  # a minute of compiling; test_smollm2.py always compares losses with PyTorch
def test_losses_on_the_cpu_are_the_recorded_ones(on_cpu: dict[str, Any]) -> None:
    own = on_cpu["machine"]
    check_losses(on_cpu, own if (GOLDEN / f"{own}.json").exists() else "cpu-aarch64")


@full_dose_only  # nothing else resumes with them
def test_a_resumed_run_is_bit_identical_with_xlas_optimizations(on_cpu: dict[str, Any]) -> None:
    assert on_cpu["resumed"] == on_cpu["whole"]


@pytest.mark.skipif(not has_accelerator(), reason="no GPU on this machine")
def test_losses_on_the_gpu_are_the_recorded_ones() -> None:
    found = measure("gpu")
    if not (GOLDEN / f"{found['machine']}.json").exists():
        pytest.skip(f"no losses recorded for {found['machine']}: run tools/golden.py --write")
    check_losses(found, found["machine"])
    assert found["resumed"] == found["whole"]
