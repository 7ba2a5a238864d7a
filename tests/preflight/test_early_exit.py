"""Compilation that is abandoned once the memory layout is known: what is read is complete, however slowly the compiler
writes its files."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from trillora.preflight.early_exit import POLL_SECONDS, SCHEDULED, compile_until_layout
from trillora.preflight.hlo.simulate import parse

REPORT = "Memory Space: default\nTotal bytes: 4096\n"
PROGRAM = """HloModule step, is_scheduled=true

%inner (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p), metadata={op_name="negate"}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0), metadata={op_name="x"}
  ROOT %y = f32[8]{0} fusion(%x), kind=kLoop, calls=%inner, metadata={op_name="y"}
}

"""


def write(dump: Path, pattern: str, text: str) -> None:
    with open(dump / pattern.replace("*", "module_0000."), "a") as file:
        file.write(text)


@pytest.mark.parametrize("report_comes", ["first", "never"])
def test_a_program_is_read_when_it_is_complete(tmp_path: Path, report_comes: str) -> None:
    """The compiler writes line by line, and is looked at after each. Then it generates code, which is not awaited, or,
    without a report, is."""
    is_read = threading.Event()

    def compile_slowly(xla_dump_to: str) -> Any:
        dump = Path(xla_dump_to)
        if report_comes == "first":
            write(dump, "*memory-usage-report.txt", REPORT)
        for line in PROGRAM.splitlines(keepends=True):
            write(dump, SCHEDULED, line)
            time.sleep(3 * POLL_SECONDS)
        if report_comes == "first":
            is_read.wait(30)
        return _Compiled()

    result = compile_until_layout(compile_slowly, tmp_path / "dump", whole=False)
    is_read.set()
    assert result.program is not None and parse(result.program).entry.name == "main"
    assert result.is_whole == (report_comes == "never")
    if report_comes == "first":
        assert result.program.rstrip() == PROGRAM.rstrip() and result.needed == 4096


class _Compiled:
    """A compiled program, as far as it is asked for."""

    def as_text(self) -> str:
        return PROGRAM

    def memory_analysis(self) -> Any:
        return None
