"""cuDNN's ragged attention equals the reference, on machines with an NVIDIA GPU of a generation that has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trillora.devices.chips import has_accelerator

PROGRAM = Path(__file__).parents[1] / "support" / "ragged_on_gpu.py"


@pytest.mark.skipif(not has_accelerator(), reason="no GPU on this machine")
def test_outputs_and_gradients_with_the_lengths_of_documents_equal_the_reference() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    environment.pop("JAX_PLATFORMS", None)
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "--json"], env=environment, capture_output=True, text=True, timeout=600
    )
    if "no ragged attention" in done.stdout:
        pytest.skip(done.stdout.splitlines()[-1])
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 23
    assert {name: result for name, result in results.items() if not result["passes"]} == {}, done.stderr[-3000:]
