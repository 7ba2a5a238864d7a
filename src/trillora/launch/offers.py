"""Which TPU slices Google Cloud rents, under which names, where, and for how much. Data only.

    offer = find_offer("v5e-8")
    offer.accelerator_type, offer.runtime_version, offer.zones[0]   # v5litepod-8 v2-alpha-tpuv5-lite us-central1-a
    offer.price(spot=True)                                          # (2.74, 4.85) dollars per hour of the slice

Google changes neither the Cloud TPU API nor what it offers there any more: from 7x on, chips are Compute Engine
machines (docs.cloud.google.com/tpu/docs/tpus-in-compute-engine).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from trillora.devices.slices import NOT_RENTED, Slice, find_slice
from trillora.errors import TrilloraError

CLOUD_TPU, COMPUTE_ENGINE = "cloud-tpu", "compute-engine"
PRICES_OF = "2026-08-21, US"


@dataclass(frozen=True)
class ChipOffer:
    """What is the same for all slices of a chip."""

    type_prefix: str | None  # of the accelerator type in the Cloud TPU API; None: it is not offered there
    runtime_version: str | None  # the machine's image in the Cloud TPU API
    machine_types: dict[str, str]  # slice -> machine type of Compute Engine
    image_family: str
    zones: tuple[str, ...]
    on_demand: float | None  # dollars per chip-hour; None: not published
    spot: tuple[float, float] | None  # lowest and highest of the zones


OLDER_IMAGE = "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"
# Zones: cloud.google.com/tpu/docs/types-zones. Prices: the catalog of skypilot-org/skypilot-catalog, divided by chips.
# Compute Engine refuses v5e: "This user agent is not allowed to use the machine type".
CHIP_OFFERS: dict[str, ChipOffer] = {
    "v5e": ChipOffer(
        type_prefix="v5litepod",
        runtime_version="v2-alpha-tpuv5-lite",
        machine_types={},
        image_family=OLDER_IMAGE,
        zones=("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a"),
        on_demand=9.60 / 8,
        spot=(2.74 / 8, 4.85 / 8),
    ),
    "v6e": ChipOffer(
        type_prefix="v6e",
        runtime_version="v2-alpha-tpuv6e",
        machine_types={f"v6e-{chips}": f"ct6e-standard-{chips}t" for chips in (1, 4, 8)},
        image_family=OLDER_IMAGE,
        zones=("us-central1-b", "us-east1-d", "us-east5-a", "us-east5-b", "europe-west4-a"),
        on_demand=21.60 / 8,
        spot=(5.21 / 8, 12.35 / 8),
    ),
    "v5p": ChipOffer(
        type_prefix="v5p",
        runtime_version="v2-alpha-tpuv5",
        machine_types={"v5p-8": "ct5p-hightpu-4t"},
        image_family=OLDER_IMAGE,
        zones=("us-central1-a", "us-east5-a"),
        on_demand=16.80 / 4,
        spot=(3.25 / 4, 4.24 / 4),
    ),
    "7x": ChipOffer(
        type_prefix=None,
        runtime_version=None,
        machine_types={"7x-8": "tpu7x-standard-4t"},
        image_family="ubuntu-accel-2404-amd64-tpu-tpu7x",
        zones=("us-central1-c",),
        on_demand=None,
        spot=None,
    ),
}


@dataclass(frozen=True)
class Offer:
    """One slice as Google Cloud rents it."""

    slice: Slice
    chip: ChipOffer

    @property
    def backends(self) -> tuple[str, ...]:
        """Where it can be rented with this launcher, preferred first."""
        cloud_tpu = (CLOUD_TPU,) if self.chip.type_prefix else ()
        return (*cloud_tpu, COMPUTE_ENGINE) if self.machine_type else cloud_tpu

    @property
    def accelerator_type(self) -> str:
        return f"{self.chip.type_prefix}-{self.slice.name.rpartition('-')[2]}"

    @property
    def runtime_version(self) -> str:
        return self.chip.runtime_version or ""

    @property
    def machine_type(self) -> str | None:
        return self.chip.machine_types.get(self.slice.name)

    @property
    def zones(self) -> tuple[str, ...]:
        return self.chip.zones

    def price(self, *, spot: bool) -> tuple[float, float] | None:
        """Lowest and highest price of the slice in dollars per hour; None: not published."""
        one = self.chip.spot if spot else self.chip.on_demand and (self.chip.on_demand, self.chip.on_demand)
        return (one[0] * self.slice.num_chips, one[1] * self.slice.num_chips) if one else None

    def costs(self, *, spot: bool, hours: float | None) -> list[str]:
        """What it costs per hour, and for a run of these hours, in lines for people."""
        kind, price = "spot" if spot else "on demand", self.price(spot=spot)
        if price is None:
            return [f"{self.slice.name} {kind}: no price is published; see cloud.google.com/tpu/pricing"]
        lines = [f"{self.slice.name} {kind}: {_dollars(*price)} per hour (prices of {PRICES_OF})"]
        if hours is not None:
            total = _dollars(price[0] * hours, price[1] * hours)
            lines.append(f"The run takes {hours:.2f} h by preflight: {total}, and the time for boot and set-up")
        return lines


def _dollars(low: float, high: float) -> str:
    return f"${low:.2f}" if low == high else f"${low:.2f} to ${high:.2f}"


def find_offer(slice_name: str) -> Offer:
    """The offer for a slice. TrilloraError if Google Cloud does not rent it."""
    slice = find_slice(slice_name)
    if slice.platform is not None:
        raise TrilloraError(
            f"'{slice_name}' is a notebook of {slice.platform.name}, not a machine that can be rented.",
            where="--on",
            do=f"use --on v6e-8, or `trillora launch {slice.name.partition('-')[0]}`",
        )
    chip = CHIP_OFFERS.get(slice.chip)
    if chip is None or slice.name in NOT_RENTED:
        raise TrilloraError(
            f"Google Cloud does not rent {slice.name} to this launcher.",
            where="--on",
            do=f"use another slice of {', '.join(CHIP_OFFERS)}, such as v5e-8, v6e-8 or v5p-8",
        )
    return Offer(slice, chip)


def choose_backend(offer: Offer, asked: str | None) -> str:
    if asked is None and offer.backends:
        return offer.backends[0]
    if asked in offer.backends:
        return str(asked)
    if offer.slice.num_hosts > 1:
        what = f"{offer.slice.name} has {offer.slice.num_hosts} hosts. On Compute Engine that needs an instance group."
        do = "use --as xpk (GKE)" + (f", or --backend {CLOUD_TPU}" if CLOUD_TPU in offer.backends else "")
    elif offer.backends:
        what = f"{offer.slice.name} cannot be rented with --backend {asked}."
        do = f"use --backend {offer.backends[0]}"
    else:
        what, do = f"No machine with exactly {offer.slice.name} is known.", "use --on 7x-8, or --as xpk (GKE)"
    raise TrilloraError(what, where="--backend", do=do)


def choose_zone(offer: Offer, asked: str | None, *, force: bool) -> str:
    """The zone. Google's list of zones is incomplete, so `force` accepts any that looks like one."""
    if asked is None:
        return offer.zones[0]
    if not re.fullmatch(r"[a-z]+-[a-z]+[0-9]{1,2}-[a-z]", asked):
        raise TrilloraError(
            f"'{asked[:40]}' is not a zone of Google Cloud.", where="--zone", do=f"use one of {' '.join(offer.zones)}"
        )
    if asked not in offer.zones and not force:
        raise TrilloraError(
            f"Zone {asked} has no {offer.slice.chip} that we know of.",
            where="--zone",
            do=f"use one of {' '.join(offer.zones)}; pass --force to try {asked} anyway",
        )
    return asked


def checked_name(name: str) -> str:
    """A name that Google accepts for a machine, and xpk for a job."""
    if not re.fullmatch(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?", name):
        do = "use up to 40 lower case letters, digits and hyphens; start with a letter"
        raise TrilloraError(f"'{name[:60]}' cannot be the name of a machine.", where="--name", do=do)
    return name


def checked_project(project: str | None) -> str | None:
    if project is not None and not re.fullmatch(r"[a-z][a-z0-9.:-]{3,80}", project):
        do = "use the project's ID, see `gcloud projects list`"
        raise TrilloraError(f"'{project[:60]}' is not the ID of a project.", where="--project", do=do)
    return project


def default_name(recipe: str) -> str:
    """The name of a recipe's machine.

    >>> default_name("chat")
    'trillora-chat'
    """
    return f"trillora-{recipe}"[:40].rstrip("-")
