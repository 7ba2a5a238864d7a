"""The commands of the first hour: quickstart, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trillora.cli.errors import EXIT_MISTAKE
from trillora.cli.options import JsonEvents, JsonResult, RunFolder
from trillora.cli.output import print_json, progress_on_stderr, run_events, show_evaluation, show_stopped
from trillora.errors import EXIT_STOPPED

EXIT_REFUSED = 1


def quickstart(context: typer.Context, out: RunFolder = Path("runs/quickstart"), as_json: JsonEvents = False) -> None:
    """Train a small model offline, in minutes on a laptop."""
    with run_events(as_json) as listener:
        from trillora.devices.quiet import start_gpu

        start_gpu()
        from trillora.quickstart import run as lesson

        result, evaluation = lesson.run(out, listener)
    if evaluation is None:
        show_stopped(result.run, context, as_json)
        raise typer.Exit(EXIT_STOPPED)
    show_evaluation(evaluation, as_json)
    if not as_json:
        from trillora.report.run.next_steps import after_quickstart

        print(after_quickstart(result.run))


def doctor(
    prove: Annotated[
        bool,
        typer.Option(
            "--prove", help="Train a small known model on the chips, compare its gradients, and measure speeds."
        ),
    ] = False,
    as_json: JsonResult = False,
) -> None:
    """Check this machine and show how to fix problems.

    Exit code 2: something is broken. With --prove, exit code 1: a chip computes wrong results.
    """
    if prove:
        _prove(as_json)
        return
    import dataclasses

    from trillora.doctor import examine, this_machine

    if not as_json:
        print("Checking this machine. Starting jax may take a minute on a TPU.", file=sys.stderr)
    findings = examine(this_machine())
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        from trillora.report.machine.screen import show_findings

        show_findings(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(EXIT_MISTAKE)


def _prove(as_json: bool) -> None:
    """The record goes to stdout and to the cache folder, where preflight finds it."""
    with progress_on_stderr() as listener:
        from trillora.events import Note
        from trillora.prove.client import prove

        listener(Note("Proving the chips of this machine: about a minute"))
        record = prove(listener)
        try:
            path = record.save()
        except OSError as error:
            path = None
            listener(Note(f"The record cannot be stored: {error.strerror}; use --json"))
    if as_json:
        print_json(record.to_dict())
    else:
        from trillora.report.machine.screen import show_proof

        show_proof(record, path)
    if not record.ok:
        raise typer.Exit(EXIT_REFUSED)
