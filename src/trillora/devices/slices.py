"""Slices: groups of TPU chips rented together, and the platforms that rent them out. No jax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from trillora.errors import TrilloraError, nearest

# ---- who lends them, and on what terms


@dataclass(frozen=True)
class Platform:
    """A notebook service: how long a session lasts and what its machine holds."""

    name: str
    session_hours: float
    weekly_hours: float | None  # None: no published quota
    host_ram_gib: float
    disk_gib: float
    price_per_hour: float | None  # of one chip; 0 where it is free, None where it is not published


# Free notebooks "at most 12 hours" (research.google.com/colaboratory/faq.html). RAM and disk are not published:
# about 47 and 225 GiB were seen on the v5e-1 runtime.
COLAB = Platform("Colab", 12.0, None, 47.0, 225.0, 0.0)
# A paid runtime: compute units an hour are not published; about 173 GiB of RAM and 225 of disk were seen.
COLAB_PAID = Platform("Colab (paid)", 24.0, None, 173.0, 225.0, None)
# 9 hours a session and 20 a week (kaggle.com/docs/tpu); about 20 GB of disk are promised, what lies outside of
# /kaggle/working is more but not published. Nor is the RAM: about 330 GiB were seen on TPU VMs.
KAGGLE = Platform("Kaggle", 9.0, 20.0, 330.0, 20.0, 0.0)


# ---- slices


@dataclass(frozen=True)
class Slice:
    """Chips that are rented together, as `jax.experimental.topologies` wants them named."""

    name: str
    chip: str
    topology: str
    options: dict[str, Any]
    num_devices: int  # of JAX
    num_chips: int  # as they are paid for
    num_hosts: int
    host_ram_gib: float  # of one host
    disk_gib: float  # likewise, free
    platform: Platform | None = None  # None: rented from Cloud by the hour, no limit on a session


Bounds = tuple[int, int, int]
ONE_CHIP, TWO_CHIPS, FOUR_CHIPS, EIGHT_CHIPS = (1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 4, 1)

# RAM of a Cloud TPU VM by the chips it holds (cloud.google.com/tpu/docs, "VM types"); v2, v3 and one chip of 7x: about.
# Two chips are half of a four-chip VM: jax can be told to use them, nobody rents them.
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
CLOUD_DISK_GIB = 80.0  # about what is free of a TPU VM's boot disk, 100 GB unless more is asked for


def _slice(chip: str, number: int, topology: str, host: Bounds, wrapped: str = "") -> Slice:
    """`wrapped`: the axes that close into rings, of x, y and z."""
    family = "tpu7x" if chip == "7x" else chip
    num_chips, chips_per_host = math.prod(int(side) for side in topology.split("x")), math.prod(host)
    return Slice(
        name=f"{chip}-{number}",
        chip=chip,
        topology=f"{family}:{topology}",
        options={
            "chips_per_host_bounds": host,
            "wrap": tuple(axis in wrapped for axis in "xyz"),
            # Megacore: a chip's two cores as one device.
            "chip_config_name": "megacore" if chip in ("v4", "v5p") else "default",
        },
        num_devices=num_chips * (2 if chip in ("v2", "v3", "7x") else 1),
        num_chips=num_chips,
        num_hosts=num_chips // chips_per_host,
        host_ram_gib=HOST_RAM_GIB[chip][chips_per_host],
        disk_gib=CLOUD_DISK_GIB,
    )


def _all_slices() -> dict[str, Slice]:
    """By Cloud's names: v5e and v6e count chips, the others cores. Rings close where a pod's whole side is rented."""
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


def _lent(name: str, slice: Slice, platform: Platform) -> Slice:
    return replace(slice, name=name, platform=platform, host_ram_gib=platform.host_ram_gib, disk_gib=platform.disk_gib)


SLICES: dict[str, Slice] = _all_slices()
LENT: dict[str, Slice] = {
    "colab": _lent("colab", SLICES["v5e-1"], COLAB),
    "colab-v6e": _lent("colab-v6e", SLICES["v6e-1"], COLAB_PAID),
    "kaggle": _lent("kaggle", SLICES["v5e-8"], KAGGLE),
}
# Other names for the same things: (how it begins, how we begin it). The last is Kaggle's `machine_shape`.
ALIASES = (("v5litepod-", "v5e-"), ("tpu7x-", "7x-"), ("v7x-", "7x-"), ("tpuv5e8", "kaggle"))


def find_slice(name: str) -> Slice:
    """By Cloud's name, or `colab`, `kaggle`; any case."""
    wanted = name.strip().lower()
    for alias, ours in ALIASES:
        if wanted.startswith(alias):
            wanted = ours + wanted.removeprefix(alias)
    known = SLICES | LENT
    if wanted not in known:
        guess = nearest(wanted, known)
        hint = f"did you mean {guess}? " if guess else ""
        raise TrilloraError(f"No slice is called {name}.", where="--on", do=f"{hint}Known: {' '.join(known)}")
    return known[wanted]


def larger_slices(slice: Slice) -> list[Slice]:
    """Those that can be rented with more of the same chips, the smallest first."""
    larger = [
        other
        for other in SLICES.values()
        if other.chip == slice.chip and other.num_devices > slice.num_devices and other.name not in NOT_RENTED
    ]
    return sorted(larger, key=lambda other: other.num_devices)


# What libtpu reads before jax is imported, so that it compiles for chips that are not there and asks no server.
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
