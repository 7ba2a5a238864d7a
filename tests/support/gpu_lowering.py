"""Programs lowered for an NVIDIA GPU on a machine without one."""

from __future__ import annotations

from typing import Any

import jax
import pytest


def lowered_for_a_gpu(function: Any, *given: Any) -> str:
    """Only the last step, from Triton to machine code, needs a GPU."""
    try:
        return jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()
    except RuntimeError as error:  # jax 0.11 asks the GPU for its kind
        assert "No supported GPU devices" in str(error)
        pytest.skip(str(error))
