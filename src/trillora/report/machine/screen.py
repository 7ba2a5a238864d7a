"""Shows what `trillora doctor` found, and the proof of `trillora doctor --prove`, in the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trillora.devices.chips import CHIPS
from trillora.devices.measured import MeasuredChip
from trillora.doctor import Finding
from trillora.own_command import runnable
from trillora.report.numbers import format_count
from trillora.report.safe_console import SafeConsole
from trillora.safe_text import visible

STYLES = {"ok": "green", "refused": "bold red", "skipped": "yellow"}


def show_findings(findings: Iterable[Finding], console: Console | None = None) -> None:
    """Prints the doctor's findings, each followed by its fix."""
    console = console or SafeConsole()
    looks = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "broken": ("broken ", "bold red")}
    for finding in findings:
        word, style = looks[finding.state]
        console.print(Text.assemble((word, style), f"  {finding.name:<15} {finding.what}"), soft_wrap=True)
        if finding.do:
            console.print(Text.assemble(" " * 25, ("do: ", "dim"), runnable(finding.do)), soft_wrap=True)


def show_proof(record: MeasuredChip, path: Path | None, console: Console | None = None) -> None:
    """Prints a table of what was compared, the verdict, and where the record is."""
    console = console or SafeConsole()
    devices = f"{format_count(record.num_devices, 'device', 'devices')} {visible(record.device_kind)}"
    console.print(Text.assemble((devices, "bold"), f" ({visible(record.platform)}), {record.seconds:.0f} s"))
    for dtype, figures in record.golden.items():
        console.print(Text(f"golden model in {dtype}: {figures.how}", "dim"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("compared", "", "figures"):
        table.add_column(heading)
    for check in record.checks:
        table.add_row(Text(visible(check.name)), Text(check.state, STYLES[check.state]), Text(visible(check.figures)))
    console.print(table)
    refused = [check for check in record.checks if check.state == "refused"]
    if not refused:
        console.print(Text("This machine trains correctly.", "bold green"))
        if path is not None:
            used = " Preflight uses its speeds." if record.chip in CHIPS else ""
            console.print(Text(f"Record: {path}.{used}"), soft_wrap=True)
        return
    console.print(Text(f"REFUSED: {len(refused)} of {len(record.checks)} checks. Do not train here.", "bold red"))
    for check in refused:
        console.print(Text(f"  what:  {visible(check.name)}: {visible(check.figures)}"), soft_wrap=True)
        if check.where:
            console.print(Text(f"  where: {visible(check.where)}"), soft_wrap=True)
    sent = f"send us the record {path}" if path is not None else "run it again with --json and send us its output"
    console.print(Text(f"  do:    {sent}; meanwhile use another machine or other library versions"), soft_wrap=True)
