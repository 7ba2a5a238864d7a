"""Environment variables that keep jax, libtpu and transformers quiet. Set them before these libraries are imported.

On a machine without an accelerator, an installed libtpu searches for chips when jax starts, and prints warnings and
stack traces. `JAX_PLATFORMS=cpu` avoids that. Values that the user has set are never changed.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from trillora.devices.chips import has_accelerator


def quiet_libraries(
    backend: str = "auto", environment: MutableMapping[str, str] = os.environ, accelerator: bool | None = None
) -> None:
    """Sets the variables. `backend` is the recipe's `hardware.backend`: jax looks for a chip that the recipe names."""
    accelerator = has_accelerator() if accelerator is None else accelerator
    level = "2" if accelerator else "3"  # 2 shows errors, 3 only fatal ones
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
        environment.setdefault(name, level)
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_VERBOSITY"):
        environment.setdefault(name, "error")
    if backend == "cpu" or (backend == "auto" and not accelerator):
        environment.setdefault("JAX_PLATFORMS", "cpu")
