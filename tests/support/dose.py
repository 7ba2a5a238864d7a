"""How much is tested: a small dose by `make test`, every test by `make test-all`, every repetition by `make soak`.

TRILLORA_DOSE=full enables the slow tests and cases. TRILLORA_DOSE_SCALE is the fraction of the repetitions in `dose`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

FULL = os.environ.get("TRILLORA_DOSE") == "full"
full_dose_only = pytest.mark.skipif(not FULL, reason="slow: only with `make test-all` (TRILLORA_DOSE=full)")


def slow_case(*values: Any) -> Any:
    """A case of `parametrize` that takes long and runs at full dose only."""
    return pytest.param(*values, marks=full_dose_only)


def dose(small: int, full: int) -> int:
    """The number of repetitions: a fraction of the full number, and never less than the small one."""
    if not FULL:
        return small
    return max(small, round(full * float(os.environ.get("TRILLORA_DOSE_SCALE", "1"))))


def log_progress(text: str) -> None:
    """Append a line to TRILLORA_DOSE_LOG, because pytest captures what is printed."""
    if file := os.environ.get("TRILLORA_DOSE_LOG"):
        with open(file, "a", encoding="utf-8") as log:
            log.write(text + "\n")
