"""Real data sets load leniently, and the summary adds up. They are downloaded, so only at full dose."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dose import full_dose_only

TOOL = Path(__file__).parents[2] / "tools" / "real_data.py"
spec = importlib.util.spec_from_file_location("real_data", TOOL)
assert spec is not None and spec.loader is not None
real_data = importlib.util.module_from_spec(spec)
sys.modules["real_data"] = real_data  # dataclasses look their module up
spec.loader.exec_module(real_data)


@full_dose_only
@pytest.mark.parametrize("name", [real_set.name for real_set in real_data.SETS])
def test_a_real_data_set_loads_and_its_summary_adds_up(
    name: str, record_property: Callable[[str, object], None]
) -> None:
    (real_set,) = (one for one in real_data.SETS if one.name == name)
    file = real_data.fetch(real_set, real_data.default_folder())
    report: dict[str, Any] = real_data.inspect(real_set, file)
    assert report["verdict"]["ready"]
    assert report["rows"] > 0 and report["trained_tokens"] > 0
    for parts in (
        [facts["rows"] for facts in report["files"]],
        [facts["rows"] for facts in report["sources"]],
        report["kinds"].values(),
        report["formats"].values(),
        report["splits"].values(),
    ):
        assert sum(parts) == report["rows"]
    assert sum(reason["rows"] for reason in report["reasons"]) == report["bad_rows"]
    record_property("data sets", 1)
    record_property("rows", report["rows"])
    record_property("bad rows, counted with their reason", report["bad_rows"])


def test_every_set_is_pinned_by_checksum() -> None:
    assert len(real_data.SETS) >= 6
    assert all(len(one.wheel.sha256) == 64 and "==" in one.wheel.requirement for one in real_data.SETS)
