"""The report of a run, written and parsed."""

from __future__ import annotations

from pathlib import Path

from trillora.report.run.write import write_report


def report(run: Path) -> str:
    return write_report(run).read_text("utf-8")
