"""Compilation that is abandoned once the memory layout is known.

A TPU compilation fixes memory and instruction order in the first 5 % of its time; the rest is code generation. The
compiler cannot be stopped there, but it dumps its intermediate results to files. We read the files as soon as they are
complete and ignore the compiling thread, which runs until the process ends. So the process should end soon.
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
    """What the compiler found out about a step."""

    report: MemoryReport | None
    program: str | None  # scheduled HLO text; None if it does not fit
    needed: float  # bytes per device; infinite if the compiler stopped before it knew
    seconds: float
    is_whole: bool


def compile_until_layout(compile_program: Callable[..., object], dump: Path, *, whole: bool) -> CompileResult:
    """Compile until memory and instruction order are known; with `whole`, to the end.

    `compile_program` takes compiler options and returns the compiled program. The folder `dump` is created."""
    dump.mkdir()
    start = time.monotonic()
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append(compile_program(xla_dump_to=str(dump)))
        except Exception as error:  # raised again by the waiting thread
            outcome.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    while worker.is_alive() and (whole or not _is_complete(dump)):
        worker.join(POLL_SECONDS)
    seconds = time.monotonic() - start
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
    """Whether the report and the scheduled program, which is written after it, are complete."""
    report, program = next(dump.glob(REPORT), None), next(dump.glob(SCHEDULED), None)
    return report is not None and program is not None and _ends_with_entry(program)


def _ends_with_entry(file: Path) -> bool:
    """Whether a program has its last computation, the entry. What is written so far may also end with the brace of
    another computation, or of an instruction's attributes."""
    with open(file, "rb") as stream:
        stream.seek(0, os.SEEK_END)
        stream.seek(-min(stream.tell(), 8), os.SEEK_END)
        if not stream.read().rstrip().endswith(b"\n}"):
            return False
        stream.seek(0)
        return b"\nENTRY " in stream.read()


def _read(dump: Path) -> MemoryReport | None:
    file = next(dump.glob(REPORT), None)
    return read_report(file.read_text()) if file is not None else None
