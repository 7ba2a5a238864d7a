"""Memory, peak arithmetic and bandwidth of each TPU and GPU, and what each generation of GPUs can compute. No jax."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trillora.errors import TrilloraError

GIB = 2**30  # bytes


@dataclass(frozen=True)
class Chip:
    """One JAX device. On v2, v3 and 7x that is half a chip, because each core is a device."""

    hbm_gib: float  # usable memory; the compiler enforces this limit
    bf16_tflops: float  # dense; float16 on GPUs without bfloat16
    hbm_gb_per_second: float
    link_gb_per_second: float  # one interconnect link in one direction; 0 if there is none
    torus_dims: int  # dimensions of the torus of devices; 0 if they are not connected as a torus
    clock_ghz: float
    matrix_unit: int  # side of the systolic array; on a GPU, of a tensor core's tile
    doubled: tuple[str, ...] = ()  # 8-bit formats with twice the bf16 rate, if XLA's matmuls in them are faster

    @property
    def fewest_tokens(self) -> int:
        """For a matmul with a wide weight in bfloat16, a power of two: with fewer, reading the weight and writing the
        result take as long as the arithmetic. 512 on v5e, 1024 on v6e."""
        flops_per_byte = 1e3 * self.bf16_tflops / self.hbm_gb_per_second
        return int(2 ** math.ceil(math.log2(1.5 * flops_per_byte)))


# Peaks and bandwidths: Google's page for each version (cloud.google.com/tpu/docs), divided by the devices of a chip.
# Links: those pages give 50 GB/s per link and direction for v4 and v5e, and 100 for v5p, v6e and 7x. We use 90 % of
# that, as the JAX team's scaling book does. v2 and v3: Jouppi et al., CACM 2020, 496 and 656 Gbit/s, shared by two
# devices. The clock follows from the peak and the matrix units. v4 has int8 matmuls at the rate of bf16; 7x has fp8,
# but whether XLA uses it there is not known.
CHIPS: dict[str, Chip] = {
    "v2": Chip(7.48, 22.9, 350, 31, 2, 0.70, 128),
    "v3": Chip(15.48, 61.5, 450, 41, 2, 0.94, 128),
    "v4": Chip(30.75, 275, 1228, 45, 3, 1.05, 128),
    "v5e": Chip(15.75, 197, 819, 45, 2, 1.50, 128, ("int8",)),
    "v5p": Chip(95.74, 459, 2765, 90, 3, 1.75, 128, ("int8",)),
    "v6e": Chip(31.25, 918, 1638, 90, 2, 1.75, 256, ("int8",)),
    "7x": Chip(94.75, 1153.5, 3690, 90, 3, 2.20, 256),
}

# NVIDIA's data sheets, without sparsity; memory as shown by the driver. A variant with a longer name comes before the
# shorter name. Links: NVLink to the other GPUs of a board, all links together. Clock: the one that gives the peak.
# XLA's int8 matmuls are not faster than bf16 (H200: 1.0 to 1.5 times the time).
GPUS: dict[str, Chip] = {
    "H200": Chip(139.8, 989, 4800, 450, 0, 1.83, 16, ("fp8",)),
    "H100 PCIe": Chip(79.1, 756, 2000, 0, 0, 1.62, 16, ("fp8",)),
    "H100": Chip(79.1, 989, 3350, 450, 0, 1.83, 16, ("fp8",)),
    "A100 40GB": Chip(39.4, 312, 1555, 300, 0, 1.41, 16),
    "A100": Chip(79.1, 312, 2039, 300, 0, 1.41, 16),
    "L40S": Chip(44.4, 362, 864, 0, 0, 2.52, 16, ("fp8",)),
    "L4": Chip(22.0, 121, 300, 0, 0, 2.04, 16, ("fp8",)),
    "T4": Chip(14.6, 65, 320, 0, 0, 1.59, 16),
    "V100 32GB": Chip(31.7, 125, 900, 150, 0, 1.53, 16),
    "V100": Chip(15.8, 125, 900, 150, 0, 1.53, 16),
    "P100": Chip(15.9, 18.7, 732, 0, 0, 1.30, 1),  # no tensor cores
}


@dataclass(frozen=True)
class Generation:
    """What GPUs from this compute capability on can compute."""

    since: float  # compute capability
    has_bfloat16: bool  # matmuls of bfloat16; without them XLA converts every operand to float32
    widest_head: int  # of cuDNN's flash attention, as jax allows it; 0: there is none
    has_ragged: bool = False  # cuDNN's flash attention takes the lengths of packed documents
    has_wgmma: bool = False  # four warps multiply together: Hopper's instructions, which no other generation has


# NVIDIA's compute capabilities, newest first: Blackwell (two rows); Hopper; Ampere and Ada, which include the
# consumer cards since the RTX 30 series; Volta (V100), Turing (T4, RTX 20) and older. Heads: jax's checks before cuDNN
# is called. Ragged: jax allows it from Hopper on; it is not known whether cuDNN supports the consumer cards of
# Blackwell (12.0).
GENERATIONS = (
    Generation(11.0, True, 256),
    Generation(10.0, True, 256, has_ragged=True),
    Generation(9.0, True, 256, has_ragged=True, has_wgmma=True),
    Generation(8.0, True, 128),
    Generation(0.0, False, 0),
)
OTHER_GPU = Generation(0.0, True, 0)  # AMD: bfloat16, no cuDNN
CAPABILITY_VARIABLE = "TRILLORA_COMPUTE_CAPABILITY"  # the choices for another card, to try them on this one

# The names of TPUs in jax.
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


class Device(Protocol):
    """What decisions need of a jax device, so that devices which are not attached can take their place."""

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""

    @property
    def device_kind(self) -> str:
        """As the maker calls it."""

    @property
    def process_index(self) -> int:
        """Of the process that it is attached to."""

    def memory_stats(self) -> Mapping[str, int] | None:
        """Bytes by name; None if they are not known."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip that jax calls `device_kind`, if it is in the tables."""
    if device_kind in DEVICE_KINDS:
        return CHIPS[DEVICE_KINDS[device_kind]]
    words = set(device_kind.replace("-", " ").split())
    return next((chip for name, chip in GPUS.items() if words.issuperset(name.split())), None)


def generation_of(device: Device) -> Generation:
    """The generation of a GPU in jax. Its `compute_capability` is a number on NVIDIA GPUs, a name (gfx942) on AMD's."""
    asked = os.environ.get(CAPABILITY_VARIABLE)
    try:
        capability = float(str(asked or getattr(device, "compute_capability", "")))
        return next(generation for generation in GENERATIONS if capability >= generation.since)
    except (ValueError, StopIteration):
        if asked:
            raise TrilloraError(
                f"'{asked}' is not a compute capability.", where=CAPABILITY_VARIABLE, do="use a number such as 7.5"
            ) from None
        return OTHER_GPU


def peak_tflops(device_kind: str) -> float | None:
    """Peak TFLOP/s of one device, if it is in the tables."""
    chip = chip_of(device_kind)
    return chip.bf16_tflops if chip else None


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether this machine has a TPU, NVIDIA or AMD device file."""
    return any(any(devices.glob(pattern)) for pattern in ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd", "dxg"))
