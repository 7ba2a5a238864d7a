"""How much of a promise is tested: a little by `make test`, all of it by `make soak` (TRILLORA_DOSE=full)."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("TRILLORA_DOSE") == "full"
full_dose_only = pytest.mark.skipif(not FULL, reason="full dose only: minutes of process starts (TRILLORA_DOSE=full)")


def dose(small: int, full: int) -> int:
    """How often. TRILLORA_DOSE_SCALE takes a share of the full dose, to try a soak."""
    if not FULL:
        return small
    return max(1, round(full * float(os.environ.get("TRILLORA_DOSE_SCALE", "1"))))


def tell(text: str) -> None:
    """A line of progress for whoever waits; pytest keeps what is printed to itself."""
    if file := os.environ.get("TRILLORA_DOSE_LOG"):
        with open(file, "a", encoding="utf-8") as log:
            log.write(text + "\n")
