"""Shows a certificate in a terminal: one line per check, then the verdict."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trillora.certify.certificate import Certificate, Check, Status
from trillora.own_command import runnable
from trillora.safe_text import visible

VERDICTS = {
    "passed": ("passed", "bold green"),
    "partial": ("passed in part", "bold yellow"),
    "failed": ("FAILED", "bold red"),
}
# What is proved if no check of a part failed and none that a full certificate needs was skipped.
PARTS = {
    "files": "the files are whole",
    "trained": "the weights are what was trained",
    "contents": "configuration and other files are what the export writes",
    "reader": "another program computes the same",
    "tokenizer": "tokens and template are as in training",
    "masks": "only answers were trained",
}
STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}


def show(certificate: Certificate, console: Console) -> None:
    _show(certificate, certificate.checks, console)


def show_short(certificate: Certificate, console: Console) -> None:
    """What needs attention, what other programs read, and the verdict."""
    shown = [check for check in certificate.checks if check.status in ("failed", "warning") or check.part == "reader"]
    shown += [check for check in certificate.checks if check.name == "share of the change" and check.status == "ok"]
    _show(certificate, shown, console)


def _show(certificate: Certificate, checks: Iterable[Check], console: Console) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for check in checks:
        found = Text(visible(check.what))
        if check.do and (check.status in ("failed", "warning") or check in certificate.not_proved):
            found.append(f"\ndo: {visible(runnable(check.do))}", "dim")
        name = Text.assemble((f"{visible(check.part)}: ", "dim"), visible(check.name))
        table.add_row(Text(check.status, STYLES[check.status]), name, found)
    console.print(table)
    counts = ", ".join(f"{certificate.count(status)} {status}" for status in STYLES if certificate.count(status))
    verdict, style = VERDICTS[certificate.result]
    without = [check.name for check in certificate.not_proved if check.part == "reader"]
    verdict += visible(f", without its reader {' and '.join(without)}") if without else ""
    console.print(Text.assemble((f"{certificate.kind} {verdict}", style), f" ({counts}; {certificate.seconds:.0f} s)"))
    console.print(Text(visible(summary(certificate))))


def summary(certificate: Certificate) -> str:
    """What was proved, and what was not, with how to get it."""
    proved = [part for part in PARTS if certificate.is_proved(part)]
    text = f"Proved: {'; '.join(PARTS[part] for part in proved) or 'nothing'}."
    for check in certificate.not_proved:
        do = f"To get it: {runnable(check.do)}." if check.do else ""
        text += f" Not proved, {check.part}: {check.what} {do}".rstrip()
    return text
