"""A compilation that is left when memory is laid out.

Memory and the order of instructions are settled in the first twentieth of a compilation for a TPU; the rest makes
machine code. The compiler cannot be told to stop there, but it writes down what it does: what is needed is read as soon
as it is written, and the thread that compiles is left alone. It ends with the process, which should not live on.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trillora.preflight.hlo.memory import MemoryReport, read_report
from trillora.step.autotune import says_out_of_memory, step_bytes

REPORT = "*memory-usage-report.txt"
SCHEDULED = "*after_optimizations_after_buffer_assignment.txt"
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class CompileResult:
    """What was found out about a step."""

    report: MemoryReport | None
    program: str | None  # scheduled, as text; None where it does not fit
    needed: float  # bytes of a device; infinite where the compiler gave up before it knew
    seconds: float
    is_whole: bool


def lay_out(compile_program: Callable[..., Any], dump: Path, *, whole: bool) -> CompileResult:
    """`compile_program` takes options of the compiler and returns what it compiled; with `whole` that is waited for.
    The folder `dump` is made."""
    dump.mkdir()
    begun = time.monotonic()
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(compile_program(xla_dump_to=str(dump)))
        except Exception as error:  # for the thread that waits
            outcome.append(error)

    working = threading.Thread(target=work, daemon=True)
    working.start()
    while working.is_alive() and (whole or not _is_complete(dump)):
        working.join(POLL_SECONDS)
    seconds = time.monotonic() - begun
    report = _read(dump)
    needed = float(report.total_bytes) if report else math.inf
    if not outcome:
        return CompileResult(report, next(dump.glob(SCHEDULED)).read_text(), needed, seconds, False)
    if isinstance(outcome[0], Exception):
        if not says_out_of_memory(outcome[0]):
            raise outcome[0]
        return CompileResult(report, None, needed, seconds, False)
    return CompileResult(report, outcome[0].as_text(), needed if report else step_bytes(outcome[0]), seconds, True)


def _is_complete(dump: Path) -> bool:
    """Whether the report and the scheduled program are written to their ends."""
    report, program = next(dump.glob(REPORT), None), next(dump.glob(SCHEDULED), None)
    return report is not None and program is not None and _ends_with_brace(program)


def _ends_with_brace(file: Path) -> bool:
    with open(file, "rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(-min(stream.tell(), 8), os.SEEK_END)
        return stream.read().rstrip().endswith(b"}")


def _read(dump: Path) -> MemoryReport | None:
    file = next(dump.glob(REPORT), None)
    return read_report(file.read_text()) if file is not None else None
