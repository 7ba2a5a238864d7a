"""What was measured on a chip: whether it trains correctly, and how fast it is. No jax.

`trillora doctor --prove` writes a record, and preflight reads it:

    path = measured.save()                       # ~/.cache/trillora/measured/v5e-8.json
    load("v5e", num_devices=8, say=print)        # the same record, or None

A record may come from another machine, so it is read like any foreign file: bounded, checked, and ignored with a note
if it is damaged. Its rates are compared with the chip's public figures before they are used (`preflight.hlo.simulate`).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from trillora.devices.chips import DEVICE_KINDS
from trillora.errors import TrilloraError
from trillora.files.atomic import write_file
from trillora.files.cache_dir import cache_root
from trillora.files.read_json import parse_json, read_text

FORMAT = 1
MAX_BYTES = 1 << 20
DO = "measure again on the chip: trillora doctor --prove"

State = Literal["ok", "refused", "skipped"]


@dataclass(frozen=True)
class ProofCheck:
    """One line of the proof."""

    name: str  # what was compared
    state: State
    figures: str  # what was found, and the threshold
    where: str = ""  # where it is worst, or why it was skipped


@dataclass(frozen=True)
class GoldenFigures:
    """A training of the golden model in one number format, compared with the record."""

    how: str  # attention kernel, layers, mesh
    losses: list[float]
    expected: list[float]
    matrices: dict[str, list[float]]  # parameter -> cosine, sign agreement, ratio of the norms of its gradient


@dataclass(frozen=True)
class MeasuredChip:
    """The record of one proof. Rates are of one device, while all devices of the machine work."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    device_kind: str  # as jax calls it
    platform: str
    num_devices: int
    date: str  # ISO 8601, UTC
    libraries: dict[str, str | None]
    checks: list[ProofCheck]
    matrix_tflops: float | None = None  # of large matmuls in the number format of a run
    memory_gb_per_second: float | None = None  # read and written
    gather_gb_per_second: float | None = None  # received by a device in an all-gather; None: one device
    reduce_gb_per_second: float | None = None  # sent by a device in an all-reduce over a ring
    golden: dict[str, GoldenFigures] = field(default_factory=dict)  # by number format
    seconds: float = 0.0  # that the proof took, with the start of its process
    part_seconds: dict[str, float] = field(default_factory=dict)  # of each part
    format: int = FORMAT

    @property
    def ok(self) -> bool:
        return all(check.state != "refused" for check in self.checks)

    @property
    def chip(self) -> str:
        """The name of the chip in our tables; for others, jax's name."""
        return DEVICE_KINDS.get(self.device_kind, self.device_kind)

    @property
    def day(self) -> str:
        return self.date[:10]

    def to_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def save(self) -> Path:
        """Writes the record to the cache folder, in place of an older one of the same devices."""
        path = _folder() / f"{_slug(self.chip)}-{self.num_devices}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")
        return path


def read(file: Path) -> MeasuredChip:
    """The record in a file. A TrilloraError says what is wrong with it."""
    data = read_text(file, do=DO, max_bytes=MAX_BYTES).encode()
    return from_json(data, where=str(file))


def from_json(data: bytes, *, where: str) -> MeasuredChip:
    found = parse_json(data, dict[str, Any], where=where, do=DO).get("format")
    if found != FORMAT:
        what = f"This record has format {str(found)[:20]}; this version reads format {FORMAT}."
        raise TrilloraError(what, where=where, do=DO)
    record = parse_json(data, MeasuredChip, where=where, do=DO)
    if fault := _fault(record):
        raise TrilloraError(f"This record is not as expected: {fault}.", where=where, do=DO)
    return record


def load(chip: str, num_devices: int, say: Callable[[str], None]) -> MeasuredChip | None:
    """The stored record of a chip: of as many devices if there is one, else the newest one of any number. Records that
    cannot be used are named."""
    usable: list[MeasuredChip] = []
    for file in sorted(_folder().glob(f"{_slug(chip)}-*.json")):
        try:
            record = read(file)
        except TrilloraError as error:
            say(f"A measurement of this chip is ignored. {error.what} Where: {error.where}.")
            continue
        if record.chip != chip:
            continue
        if record.ok:
            usable.append(record)
        else:
            say(f"A measurement of this chip is ignored, because the chip was refused on {record.day}. Where: {file}.")
    return max(usable, key=lambda record: (record.num_devices == num_devices, record.date), default=None)


def _fault(record: MeasuredChip) -> str | None:
    rates = ("matrix_tflops", "memory_gb_per_second", "gather_gb_per_second", "reduce_gb_per_second")
    for name in rates:
        rate = getattr(record, name)
        if rate is not None and not (math.isfinite(rate) and rate > 0):
            return f"{name} is not a positive number"
    if not 1 <= record.num_devices <= 2**20:
        return "num_devices is out of range"
    try:
        datetime.datetime.fromisoformat(record.date)
    except ValueError:
        return "date is not a date"
    return None


def _folder() -> Path:
    return cache_root() / "measured"


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)[:60].strip("-.") or "device"
