"""The host's side: will its RAM hold the loading of the model, will its disk hold the files. No jax.

Weights go from the files to the devices one tensor at a time (`trillora.model.loading.weights`), so the RAM needed
depends on the largest tensor, not on the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from trillora.devices.slices import Platform

GIB = 2**30
# Python with torch, jax, the tokenizer and the compiler at work: 3.4 GiB was the most seen.
PROCESS_GIB = 4.0
# Of the tensor being loaded there are at most: what is read of the file, the same converted (experts stored one by
# one, another number format), its pieces for the devices, and those on their way there.
TENSOR_COPIES = 4
DISK_MARGIN = 1.1  # tokenizer, checkpoints and the adapter beside the weights; the download's unfinished file


@dataclass(frozen=True)
class HostLine:
    """One need of the host, against what it has."""

    what: str
    needed_gib: float
    available_gib: float | None  # None: not known
    ok: bool


def host_lines(
    largest_tensor_bytes: int,
    weights_bytes: int,
    bytes_held_by_host_devices: int,
    num_hosts: int,
    platform: Platform | None,
    ram_gib: float | None,
    disk_gib: float | None,
) -> tuple[HostLine, ...]:
    """RAM and disk of each host. What is not known of the machine is taken from its platform.

    `bytes_held_by_host_devices`: arrays that stay in the host's RAM because its CPU is the device, 0 for a TPU. Every
    host of several keeps all the files and reads only what its own devices hold.
    """
    if platform is not None:
        ram_gib = platform.host_ram_gib if ram_gib is None else ram_gib
        disk_gib = platform.disk_gib if disk_gib is None else disk_gib
    each = f", each of {num_hosts} hosts" if num_hosts > 1 else ""
    ram = PROCESS_GIB + (TENSOR_COPIES * largest_tensor_bytes + bytes_held_by_host_devices) / GIB
    disk = DISK_MARGIN * weights_bytes / GIB
    return (
        _line(f"RAM for loading{each}", ram, ram_gib),
        _line(f"Disk for the model{each}", disk, disk_gib),
    )


def _line(what: str, needed_gib: float, available_gib: float | None) -> HostLine:
    return HostLine(what, needed_gib, available_gib, available_gib is None or needed_gib <= available_gib)
