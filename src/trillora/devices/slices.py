"""Facts about chips, the slices they are rented in and the platforms that lend them. No jax."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError, nearest


@dataclass(frozen=True)
class Chip:
    """One JAX device of this kind: half a chip on v2, v3 and 7x, where each core is a device of its own."""

    hbm_gib: float  # usable, as the compiler enforces it
    bf16_tflops: float  # dense; float16 where a GPU has no bfloat16
    hbm_gb_per_second: float
    link_gb_per_second: float  # one interconnect link, one direction; 0 where there is none
    torus_dims: int  # directions in which links run; 0 where devices are not wired as a torus
    clock_ghz: float
    matrix_unit: int  # side of the systolic array, of a tensor core's tile on a GPU


# Peaks and bandwidths: Google's page of each version (cloud.google.com/tpu/docs), the chip's figure divided by its
# devices. Links: the pages say 50 GB/s a link and direction for v4 and v5e, 100 for v5p, v6e and 7x, of which nine
# tenths are counted, as the JAX team's scaling book does; v2 and v3: Jouppi et al., CACM 2020, 496 and 656 Gbit/s,
# shared by two devices. Clock: what the peak implies for the matrix units.
CHIPS: dict[str, Chip] = {
    "v2": Chip(7.48, 22.9, 350, 31, 2, 0.70, 128),
    "v3": Chip(15.48, 61.5, 450, 41, 2, 0.94, 128),
    "v4": Chip(30.75, 275, 1228, 45, 3, 1.05, 128),
    "v5e": Chip(15.75, 197, 819, 45, 2, 1.50, 128),
    "v5p": Chip(95.74, 459, 2765, 90, 3, 1.75, 128),
    "v6e": Chip(31.25, 918, 1638, 90, 2, 1.75, 256),
    "7x": Chip(94.75, 1153.5, 3690, 90, 3, 2.20, 256),
}

# NVIDIA's data sheets, without sparsity; memory as the driver shows it. A longer name is a variant of a shorter one
# and stands before it. Links: NVLink to the other GPUs of a board, all links together; clock: the one of the peak.
GPUS: dict[str, Chip] = {
    "H200": Chip(139.8, 989, 4800, 450, 0, 1.83, 16),
    "H100 PCIe": Chip(79.1, 756, 2000, 0, 0, 1.62, 16),
    "H100": Chip(79.1, 989, 3350, 450, 0, 1.83, 16),
    "A100 40GB": Chip(39.4, 312, 1555, 300, 0, 1.41, 16),
    "A100": Chip(79.1, 312, 2039, 300, 0, 1.41, 16),
    "L40S": Chip(44.4, 362, 864, 0, 0, 2.52, 16),
    "L4": Chip(22.0, 121, 300, 0, 0, 2.04, 16),
    "T4": Chip(14.6, 65, 320, 0, 0, 1.59, 16),
    "V100 32GB": Chip(31.7, 125, 900, 150, 0, 1.53, 16),
    "V100": Chip(15.8, 125, 900, 150, 0, 1.53, 16),
}

# What jax calls the devices.
DEVICE_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "7x",
}


def chip_of(device_kind: str) -> Chip | None:
    """The chip jax names `device_kind`, where it is known."""
    if device_kind in DEVICE_KINDS:
        return CHIPS[DEVICE_KINDS[device_kind]]
    words = set(device_kind.replace("-", " ").split())
    return next((chip for name, chip in GPUS.items() if words.issuperset(name.split())), None)


def peak_tflops(device_kind: str) -> float | None:
    """Of one device, where it is known."""
    chip = chip_of(device_kind)
    return chip.bf16_tflops if chip else None


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


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether the machine shows a TPU, an NVIDIA or an AMD device to its processes."""
    return any(any(devices.glob(pattern)) for pattern in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd", "dxg"))


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
