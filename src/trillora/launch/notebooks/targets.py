"""The machines that notebooks are made for, and what differs between them. Data only.

find_target("colab", "t4").chips      "one NVIDIA T4"
find_target("kaggle", "kaggle")       the TPU: also the name of its slice in preflight
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from trillora.devices.slices import KAGGLE, NOTEBOOK_SLICES
from trillora.errors import TrilloraError

Place = Literal["colab", "kaggle"]
PLACES: dict[Place, str] = {"colab": "Colab", "kaggle": "Kaggle"}
PYTHON: dict[str, Any] = {
    "kernelspec": {"name": "python3", "display_name": "Python 3"},
    "language_info": {"name": "python"},
}
NOT_ON_TPU = (
    "**Not run on a TPU yet.** The steps of such runs compile with the real TPU compiler, and Trillora's tests execute "
    "this notebook cell by cell on a CPU."
)
NOT_ON_T4 = (
    "**Not run on a T4 yet.** Trillora's tests execute this notebook cell by cell on a CPU; its packages were used on "
    "an H200. A T4 has no bfloat16: Trillora computes in float32, and stores the base in bfloat16 only where float32 "
    "would take more than half of the memory. The packages need driver 580 or newer, which `!nvidia-smi` shows."
)


@dataclass(frozen=True)
class Target:
    """One kind of machine. `name` is the word after `--on`."""

    name: str
    place: Place
    chips: str
    backend: Literal["tpu", "gpu"]
    num_devices: int
    packages: Literal["tpu", "cuda"]  # the set
    accelerator: str  # in the platform's own words
    menu: str  # where a person chooses it
    tried: str  # what was not tried there
    hours: float | None = None  # of a session, after which the platform ends it

    @property
    def slice_name(self) -> str | None:
        """Preflight's name for it; None: preflight knows TPUs only."""
        return self.name if self.name in NOTEBOOK_SLICES else None

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the notebook. Colab chooses the machine by them. Kaggle would use a CPU if the notebook had its own."""
        if self.place == "kaggle":
            return dict(PYTHON)
        kind = {"accelerator": self.backend.upper(), "colab": {"provenance": [], "gpuType": self.accelerator.upper()}}
        return {**kind, **PYTHON}


_COLAB, _KAGGLE = "Runtime > Change runtime type >", "Settings > Accelerator >"
_TWO_T4 = f"{NOT_ON_T4} Two GPUs share each batch, which was tested on simulated devices only."
TARGETS = (
    Target("colab", "colab", "one TPU v5e chip", "tpu", 1, "tpu", "v5e1", f"{_COLAB} v5e-1 TPU", NOT_ON_TPU),
    Target("colab-v6e", "colab", "one TPU v6e chip", "tpu", 1, "tpu", "v6e1", f"{_COLAB} v6e-1 TPU", NOT_ON_TPU),
    Target("t4", "colab", "one NVIDIA T4", "gpu", 1, "cuda", "T4", f"{_COLAB} T4 GPU", NOT_ON_T4),
    Target(
        *("kaggle", "kaggle", "eight TPU v5e chips", "tpu", 8, "tpu", "TpuV5E8", f"{_KAGGLE} TPU v5e-8", NOT_ON_TPU),
        hours=KAGGLE.session_hours,
    ),
    # Kaggle allows GPUs longer sessions. A run that stops after nine hours resumes, too.
    Target(
        *("2xt4", "kaggle", "two NVIDIA T4", "gpu", 2, "cuda", "NvidiaTeslaT4", f"{_KAGGLE} GPU T4 x2", _TWO_T4),
        hours=KAGGLE.session_hours,
    ),
)


def find_target(place: Place, name: str) -> Target:
    """The machine that is called so after `--on`."""
    offered = {target.name: target for target in TARGETS if target.place == place}
    if name.lower() not in offered:
        do = f"use --on {' or --on '.join(offered)}"
        raise TrilloraError(f"{PLACES[place]} does not have {name[:40]}.", where="--on", do=do)
    return offered[name.lower()]
