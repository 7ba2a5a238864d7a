"""What happens before jax and transformers are imported: variables that keep them quiet, and an early look for GPUs.

On a machine without an accelerator, an installed libtpu searches for chips when jax starts, and prints warnings and
stack traces. `JAX_PLATFORMS=cpu` avoids that. Where jax was imported before, it has read its variables, and its setting
is changed instead. Values that the user has set are never changed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Mapping, MutableMapping
from pathlib import Path

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
    hide_widget_warning()
    if backend == "cpu" or (backend == "auto" and not accelerator):
        environment.setdefault("JAX_PLATFORMS", "cpu")
        jax = sys.modules.get("jax")
        if jax is not None and jax.config.jax_platforms is None:
            jax.config.update("jax_platforms", environment["JAX_PLATFORMS"])


def hide_widget_warning() -> None:
    """Without ipywidgets, tqdm warns in every notebook that imports transformers. Its bars are text then."""
    warnings.filterwarnings("ignore", message="IProgress not found")


def start_gpu(
    backend: str = "auto", environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")
) -> threading.Thread | None:
    """Lets jax find the GPUs in a thread, which takes seconds, while this one imports the other libraries. An error is
    raised where the devices are used. The processes of a cluster have to find each other first."""
    is_alone = "JAX_COORDINATOR_ADDRESS" not in environment and "TPU_WORKER_HOSTNAMES" not in environment
    if backend not in ("auto", "gpu") or not is_alone or not any(devices.glob("nvidia[0-9]*")):
        return None
    import jax

    def find() -> None:
        with contextlib.suppress(Exception):
            jax.devices()

    thread = threading.Thread(target=find, name="devices", daemon=True)
    thread.start()
    return thread
