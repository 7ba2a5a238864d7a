"""Chips: memory, arithmetic and bandwidth of each TPU and GPU. No jax."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


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


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether the machine shows a TPU, an NVIDIA or an AMD device to its processes."""
    return any(any(devices.glob(pattern)) for pattern in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd", "dxg"))
