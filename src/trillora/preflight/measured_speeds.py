"""Corrects step times by what `trillora doctor --prove` measured on the chip (`devices.measured`). No jax.

    measured_speeds(find_slice("v5e-8"))     # MeasuredSpeeds(date="2026-11-16", num_devices=8, hbm=1.08), or None

What was measured is one large matmul, copy or all-gather alone: the best case. A step does not exceed such a rate, so
a rate below the one that preflight assumes makes that unit slower by their ratio. A rate above it changes nothing: the
assumed rates were fitted to whole steps, with smaller matmuls. On a v5e, preflight assumes for 8 devices

    matmuls      0.92 * 197 TFLOP/s      measured 187:  as assumed
    HBM          0.85 * 819 GB/s         measured 644:  1.08 times slower
    links        0.80 * 2 * 45 GB/s      measured 75:   as assumed

Links depend on how many devices there are and how they are connected: they count only for a slice of the same size.
"""

from __future__ import annotations

from collections.abc import Callable

from trillora.devices.chips import CHIPS, Chip
from trillora.devices.measured import MeasuredChip, load
from trillora.devices.slices import Slice
from trillora.preflight.hlo.simulate import AS_ASSUMED, Slowdown, efficiency_of, num_lanes
from trillora.preflight.result import MeasuredSpeeds

SLOWEST = 3.0  # times; a chip that is slower was used by something else, or is broken
FASTEST = 1.05  # of the public figures; a faster one was not timed correctly


def measured_speeds(place: Slice, say: Callable[[str], None] = lambda text: None) -> MeasuredSpeeds | None:
    """What is known about the chip of this slice. A measurement that cannot be right is named and ignored."""
    return measured_chip(place.chip, place.num_devices, say)


def measured_chip(name: str, num_devices: int, say: Callable[[str], None] = lambda text: None) -> MeasuredSpeeds | None:
    record = load(name, num_devices, say)
    if record is None:
        return None
    chip = CHIPS[name]
    if fault := _fault(record, chip):
        say(f"The measurement of {name} on {record.day} is ignored: {fault}. Run `trillora doctor --prove` again.")
        return None
    compute, hbm, links = _slowdowns(record, chip)
    same_size = record.num_devices == num_devices
    return MeasuredSpeeds(record.day, record.num_devices, compute, hbm, links if same_size else 1.0)


def slowdown_of(speeds: MeasuredSpeeds | None) -> Slowdown:
    return Slowdown(speeds.compute, speeds.hbm, speeds.links) if speeds else AS_ASSUMED


def _slowdowns(record: MeasuredChip, chip: Chip) -> tuple[float, float, float]:
    efficiency = efficiency_of(chip)
    lanes = num_lanes(chip, record.num_devices) if record.num_devices > 2 else 1
    pairs = (
        (chip.bf16_tflops * efficiency.product, record.matrix_tflops),
        (chip.hbm_gb_per_second * efficiency.hbm, record.memory_gb_per_second),
        (lanes * chip.link_gb_per_second * efficiency.links, record.gather_gb_per_second),
    )
    compute, hbm, links = (round(max(1.0, assumed / found), 3) if found else 1.0 for assumed, found in pairs)
    return compute, hbm, links


def _fault(record: MeasuredChip, chip: Chip) -> str | None:
    public = ((chip.bf16_tflops, record.matrix_tflops), (chip.hbm_gb_per_second, record.memory_gb_per_second))
    if any(found and found > FASTEST * peak for peak, found in public):
        return "it is faster than the chip can be"
    slowest = max(_slowdowns(record, chip))
    if slowest > SLOWEST:
        return f"it is {slowest:.1f} times slower than other chips of this kind"
    return None
