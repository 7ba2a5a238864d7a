"""Shows a certificate in a terminal: one line per check, then the verdict."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trillora.certify.certificate import Certificate
from trillora.report.numbers import format_number
from trillora.safe_text import visible

STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def show(certificate: Certificate, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD if console.encoding.lower().startswith("utf") else box.ASCII, pad_edge=False)
    table.add_column("part", style="dim")
    table.add_column("check")
    table.add_column("result")
    table.add_column("figure", justify="right")
    table.add_column("what was found", overflow="fold", ratio=1)
    for check in certificate.checks:
        found = Text(visible(check.what))
        if check.do and check.status in ("failed", "warning"):
            found.append(f"\ndo: {visible(check.do)}", "dim")
        figure = "" if check.figure is None else format_number(check.figure)
        result = Text(check.status, STYLES[check.status])
        table.add_row(Text(visible(check.part)), Text(visible(check.name)), result, figure, found)
    console.print(table)
    counts = ", ".join(f"{certificate.count(status)} {status}" for status in STYLES if certificate.count(status))
    verdict, style = ("passed", "bold green") if certificate.passed else ("FAILED", "bold red")
    console.print(Text.assemble((f"{certificate.kind} {verdict}", style), f" ({counts}; {certificate.seconds:.0f} s)"))
