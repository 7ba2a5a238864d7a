"""TPU slices (groups of chips that are rented together) and the notebook platforms that offer them. No jax.

Slices have Cloud's names, which count chips or cores. JAX sees devices:

    find_slice("v5e-8")   8 devices, 8 chips, 1 host
    find_slice("v4-8")    4 devices, 4 chips, 1 host: Cloud counts the 8 cores
    find_slice("kaggle")  the chips of v5e-8 with Kaggle's memory, disk and time limits
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from trillora.errors import TrilloraError, nearest

# ---- notebook platforms


@dataclass(frozen=True)
class Platform:
    """A notebook service: its time limits, and the memory and disk of its machine."""

    name: str
    session_hours: float
    weekly_hours: float | None  # None: no quota is published
    host_ram_gib: float
    disk_gib: float
    price_per_hour: float | None  # per chip; 0: free, None: not published


# Free notebooks run "at most 12 hours" (research.google.com/colaboratory/faq.html). RAM and disk are not published;
# the v5e-1 runtime had about 47 and 225 GiB.
COLAB = Platform("Colab", 12.0, None, 47.0, 225.0, 0.0)
# Paid: compute units per hour are not published. A v6e-1 runtime had about 173 GiB of RAM and 225 GiB of disk.
COLAB_PAID = Platform("Colab (paid)", 24.0, None, 173.0, 225.0, None)
# 9 hours per session, 20 per week, 20 GB of disk in /kaggle/working (kaggle.com/docs/tpu). More disk elsewhere, and
# the RAM, are not published; TPU VMs had about 330 GiB of RAM.
KAGGLE = Platform("Kaggle", 9.0, 20.0, 330.0, 20.0, 0.0)


# ---- slices


@dataclass(frozen=True)
class Slice:
    """Chips that are rented together. `topology` and `options` are arguments of `jax.experimental.topologies`."""

    name: str
    chip: str
    topology: str
    options: dict[str, Any]
    num_devices: int  # JAX devices
    num_chips: int  # the unit of prices
    num_hosts: int
    host_ram_gib: float  # per host
    disk_gib: float  # free space, per host
    platform: Platform | None = None  # None: rented by the hour from Google Cloud, without time limit


Bounds = tuple[int, int, int]
ONE_CHIP, TWO_CHIPS, FOUR_CHIPS, EIGHT_CHIPS = (1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1)

# RAM of a Cloud TPU VM by its number of chips (cloud.google.com/tpu/docs, "VM types"); approximate for v2, v3 and one
# chip of 7x. Two chips are half of a four-chip VM: jax can use them, but they cannot be rented.
HOST_RAM_GIB: dict[str, dict[int, float]] = {
    "v2": {4: 334},
    "v3": {4: 340},
    "v4": {4: 407},
    "v5e": {1: 48, 2: 192, 4: 192, 8: 384},
    "v5p": {4: 448},
    "v6e": {1: 176, 2: 720, 4: 720, 8: 1440},
    "7x": {1: 240, 4: 960},
}
NOT_RENTED = frozenset({"v5e-2", "v6e-2"})
CLOUD_DISK_GIB = 80.0  # free space of a TPU VM's default boot disk of 100 GB, approximately


def _slice(chip: str, number: int, topology: str, host: Bounds, wrapped: str = "") -> Slice:
    """`wrapped`: which of the axes x, y and z form rings."""
    family = "tpu7x" if chip == "7x" else chip
    num_chips, chips_per_host = math.prod(int(side) for side in topology.split("x")), math.prod(host)
    return Slice(
        name=f"{chip}-{number}",
        chip=chip,
        topology=f"{family}:{topology}",
        options={
            "chips_per_host_bounds": host,
            "wrap": tuple(axis in wrapped for axis in "xyz"),
            # Megacore: the two cores of a chip are one device.
            "chip_config_name": "megacore" if chip in ("v4", "v5p") else "default",
        },
        num_devices=num_chips * (2 if chip in ("v2", "v3", "7x") else 1),
        num_chips=num_chips,
        num_hosts=num_chips // chips_per_host,
        host_ram_gib=HOST_RAM_GIB[chip][chips_per_host],
        disk_gib=CLOUD_DISK_GIB,
    )


def _all_slices() -> dict[str, Slice]:
    """By Cloud's names: v5e and v6e count chips, the others cores. An axis is a ring if it spans a whole pod."""
    slices = [_slice(chip, 8, "2x2", FOUR_CHIPS) for chip in ("v2", "v3")]
    slices.append(_slice("v3", 32, "4x4", FOUR_CHIPS))
    for chip in ("v5e", "v6e"):
        slices += [
            _slice(chip, 1, "1x1", ONE_CHIP),
            _slice(chip, 2, "1x2", TWO_CHIPS),
            _slice(chip, 4, "2x2", FOUR_CHIPS),
            _slice(chip, 8, "2x4", EIGHT_CHIPS),
            _slice(chip, 16, "4x4", FOUR_CHIPS),
            _slice(chip, 32, "4x8", FOUR_CHIPS),
            _slice(chip, 64, "8x8", FOUR_CHIPS),
            _slice(chip, 128, "8x16", FOUR_CHIPS, wrapped="y"),
            _slice(chip, 256, "16x16", FOUR_CHIPS, wrapped="xy"),
        ]
    slices.append(_slice("7x", 2, "1x1x1", ONE_CHIP))
    for chip in ("v4", "v5p", "7x"):
        slices += [
            _slice(chip, 8, "2x2x1", FOUR_CHIPS),
            _slice(chip, 16, "2x2x2", FOUR_CHIPS),
            _slice(chip, 32, "2x2x4", FOUR_CHIPS),
            _slice(chip, 64, "2x4x4", FOUR_CHIPS),
            _slice(chip, 128, "4x4x4", FOUR_CHIPS, wrapped="xyz"),
        ]
    return {slice.name: slice for slice in slices}


def _on_platform(name: str, slice: Slice, platform: Platform) -> Slice:
    return replace(slice, name=name, platform=platform, host_ram_gib=platform.host_ram_gib, disk_gib=platform.disk_gib)


SLICES: dict[str, Slice] = _all_slices()
NOTEBOOK_SLICES: dict[str, Slice] = {
    "colab": _on_platform("colab", SLICES["v5e-1"], COLAB),
    "colab-v6e": _on_platform("colab-v6e", SLICES["v6e-1"], COLAB_PAID),
    "kaggle": _on_platform("kaggle", SLICES["v5e-8"], KAGGLE),
}
# Other names: (their prefix, our prefix). The last is Kaggle's `machine_shape`.
ALIASES = (("v5litepod-", "v5e-"), ("tpu7x-", "7x-"), ("v7x-", "7x-"), ("tpuv5e8", "kaggle"))


_HERE = ("cpu", "mac", "mps", "metal")
# Names of GPUs: T4, P100, 2xT4, A100-80GB, H200, RTX 4090, L40S, MI300X.
_GPU = re.compile(
    r"gpu|cuda|nvidia|geforce|[rg]tx|tesla|"
    r"(?:^|[^a-z]|x)(?:[tpl]4|g?[bhalvtp][0-9]{2,3}s?|mi[0-9]{3}x?)(?:$|x[0-9]|[^a-z0-9])"
)


def find_slice(name: str) -> Slice:
    """Finds a slice by Cloud's name, or by `colab`, `colab-v6e` or `kaggle`, in upper or lower case."""
    key = name.strip().lower()
    for alias, ours in ALIASES:
        if key.startswith(alias):
            key = ours + key.removeprefix(alias)
    known = SLICES | NOTEBOOK_SLICES
    if key not in known and _GPU.search(key):
        what = f"Preflight asks the TPU compiler about TPU slices; {name!r} is a GPU."
        do = "train a few steps on the GPU itself, which shows memory and speed: trillora train RECIPE --out RUN"
        raise TrilloraError(what, where="--on", do=f"{do} train.steps=5; see docs/gpu.md")
    if key in _HERE:
        what = f"Preflight asks the TPU compiler about TPU slices; {name!r} is none."
        do = "on this machine, train with --tiny or a few steps: trillora train RECIPE --out RUN train.steps=5"
        raise TrilloraError(what, where="--on", do=do)
    if key not in known:
        guess = nearest(key, known)
        hint = f"did you mean {guess}? " if guess else ""
        raise TrilloraError(f"Unknown slice {name!r}.", where="--on", do=f"{hint}Known: {' '.join(known)}")
    return known[key]


def larger_slices(slice: Slice) -> list[Slice]:
    """Rentable slices with more chips of the same kind, smallest first."""
    larger = [
        other
        for other in SLICES.values()
        if other.chip == slice.chip and other.num_devices > slice.num_devices and other.name not in NOT_RENTED
    ]
    return sorted(larger, key=lambda other: other.num_devices)


# Set before jax is imported, so that libtpu compiles for chips that this machine does not have, and contacts no server.
COMPILE_ONLY_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
