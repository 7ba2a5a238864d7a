"""Facts about chips: memory, speed, and what the TPU compiler calls each slice. No jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trillora.errors import TrilloraError, nearest


@dataclass(frozen=True)
class Chip:
    """One JAX device of this kind."""

    hbm_gib: float  # usable, as the compiler enforces it
    bf16_tflops: float


CHIPS = {
    "v2": Chip(7.48, 23),
    "v3": Chip(15.48, 70),
    "v4": Chip(30.75, 275),
    "v5e": Chip(15.75, 197),
    "v5p": Chip(95.74, 459),
    "v6e": Chip(31.25, 918),
    "7x": Chip(94.75, 1155),
}


# What jax calls the devices, and how fast they multiply in bfloat16.
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
GPU_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "L4": 121, "T4": 65, "V100": 125}  # dense


def peak_tflops(device_kind: str) -> float | None:
    """Of one device, where it is known."""
    if device_kind in DEVICE_KINDS:
        return CHIPS[DEVICE_KINDS[device_kind]].bf16_tflops
    words = device_kind.replace("-", " ").split()
    return next((speed for name, speed in GPU_TFLOPS.items() if name in words), None)


@dataclass(frozen=True)
class Slice:
    """Chips that are rented together, as `jax.experimental.topologies` wants them named."""

    chip: str
    topology: str
    options: dict[str, Any] = field(default_factory=dict)


def _flat(chip: str, topology: str, host: tuple[int, int, int], wrap: tuple[bool, bool, bool] = (False,) * 3) -> Slice:
    options = {"chips_per_host_bounds": host, "wrap": wrap, "chip_config_name": "default"}
    return Slice(chip, f"{chip}:{topology}", options)


SLICES: dict[str, Slice] = {
    f"{chip}-{number}": _flat(chip, topology, host)
    for chip in ("v5e", "v6e")
    for number, topology, host in (
        (1, "1x1", (1, 1, 1)),
        (4, "2x2", (2, 2, 1)),
        (8, "2x4", (2, 4, 1)),
    )
}


def find_slice(name: str) -> Slice:
    if name not in SLICES:
        guess = nearest(name, SLICES)
        hint = f"did you mean {guess}? " if guess else ""
        raise TrilloraError(f"No slice is called {name}.", where="--on", do=f"{hint}Known: {' '.join(SLICES)}")
    return SLICES[name]


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
