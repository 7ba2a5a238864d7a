"""How often a guarantee is tested: a few times by `make test`, fully by `make soak` (TRILLORA_DOSE=full)."""

from __future__ import annotations

import os

import pytest

FULL = os.environ.get("TRILLORA_DOSE") == "full"
full_dose_only = pytest.mark.skipif(not FULL, reason="takes minutes: only with TRILLORA_DOSE=full")


def dose(small: int, full: int) -> int:
    """The number of repetitions. TRILLORA_DOSE_SCALE reduces the full number for a trial."""
    if not FULL:
        return small
    return max(1, round(full * float(os.environ.get("TRILLORA_DOSE_SCALE", "1"))))


def log_progress(text: str) -> None:
    """Append a line to TRILLORA_DOSE_LOG, because pytest captures what is printed."""
    if file := os.environ.get("TRILLORA_DOSE_LOG"):
        with open(file, "a", encoding="utf-8") as log:
            log.write(text + "\n")
