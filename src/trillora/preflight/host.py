"""Host requirements: RAM for loading the model and disk for its files. No jax.

Weights go from the files to the devices one tensor at a time (`trillora.model.loading.weights`), so the RAM needed
depends on the largest tensor, not on the size of the model.
"""

from __future__ import annotations

from trillora.devices.chips import GIB
from trillora.devices.slices import Platform
from trillora.preflight.result import HostLine

# Python with torch, jax, the tokenizer and a running compiler: at most 3.4 GiB was measured.
PROCESS_GIB = 4.0
# Copies of the tensor being loaded: as read from the file, converted (stacked experts, another dtype), cut into pieces
# for the devices, and the pieces in transfer.
TENSOR_COPIES = 4
DISK_MARGIN = 1.1  # for tokenizer, checkpoints, adapter and the unfinished file of the download


def host_lines(
    largest_tensor_bytes: int,
    weights_bytes: int,
    bytes_held_by_host_devices: int,
    num_hosts: int,
    platform: Platform | None,
    ram_gib: float | None,
    disk_gib: float | None,
) -> tuple[HostLine, ...]:
    """RAM and disk of each host. Unknown sizes of the machine are taken from its platform.

    `bytes_held_by_host_devices`: arrays that stay in the host's RAM because its CPU is the device; 0 for a TPU. With
    several hosts, each stores all files and reads only the parts its own devices hold.
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
