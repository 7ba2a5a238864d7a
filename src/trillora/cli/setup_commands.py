"""The commands of the first hour: quickstart, doctor."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from trillora.cli.errors import EXIT_MISTAKE
from trillora.cli.options import JsonEvents, JsonResult, RunFolder
from trillora.cli.output import print_json, run_events, show_evaluation


def quickstart(out: RunFolder = Path("runs/quickstart"), as_json: JsonEvents = False) -> None:
    """Train a small model offline, in minutes on a laptop."""
    with run_events(as_json) as listener:
        from trillora.quickstart import run as lesson
        from trillora.training.signals import EXIT_STOPPED

        result, evaluation = lesson.run(out, listener)
    if evaluation is None:
        raise typer.Exit(EXIT_STOPPED)
    show_evaluation(evaluation, as_json)
    if not as_json:
        print(lesson.next_steps(result.run))


def doctor(as_json: JsonResult = False) -> None:
    """Check this machine and show how to fix problems.

    Exit code 2: something is broken.
    """
    import dataclasses

    from trillora.doctor import examine, this_machine

    if not as_json:
        print("Checking this machine. Starting jax may take a minute on a TPU.", file=sys.stderr)
    findings = examine(this_machine())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        from trillora.report.console import show_findings

        show_findings(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(EXIT_MISTAKE)
