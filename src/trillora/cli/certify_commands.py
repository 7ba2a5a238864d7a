"""The commands that prove that an adapter or an export is what was trained: certify, verify."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trillora.cli.options import JsonResult
from trillora.cli.output import print_json, progress_on_stderr

if TYPE_CHECKING:
    from trillora.certify.certificate import Certificate
    from trillora.events import Listener

EXIT_FAILED = 1
Target = Annotated[
    str, typer.Argument(metavar="RUN|ADAPTER|EXPORT", help="Folder of a run, an adapter or an export; or a GGUF file.")
]
BaseModel = Annotated[
    str | None, typer.Option("--base", metavar="MODEL", help="The base model, if not the one that the run names.")
]


def certify(
    target: Target,
    *,
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="RUN", help="Run or adapter that an export was made from, if it was moved."),
    ] = None,
    base: BaseModel = None,
    as_json: JsonResult = False,
) -> None:
    """Prove that an adapter or export is what was trained."""
    with progress_on_stderr(as_json=as_json) as listener:
        _check_there(target)
        certificate = certify_with_page(target, run=run, base=base, listener=listener)
    show_certificate(certificate, as_json)


def verify(target: Target, *, base: BaseModel = None, as_json: JsonResult = False) -> None:
    """Repeat the checks of a certificate, without the run."""
    with progress_on_stderr(as_json=as_json) as listener:
        _check_there(target)
        from trillora.certify.verify import verify as repeat

        certificate = repeat(target, base=base, listener=listener)
    show_certificate(certificate, as_json)


def _check_there(target: str) -> None:
    from trillora.files.user_path import user_path
    from trillora.runs.files import is_run
    from trillora.runs.saved import find_adapter

    folder = user_path(target, where="the folder to certify")
    if is_run(folder) or not folder.exists():
        find_adapter(target)  # raises if there is none


def certify_with_page(
    target: str | Path, *, run: Path | None = None, base: str | None = None, listener: Listener
) -> Certificate:
    """Certifies, and writes certificate.json and certificate.html."""
    from trillora.certify.certify import certify as check
    from trillora.certify.subject import find_subject
    from trillora.report.certificate_page import write_certificate_page

    certificate = check(target, run=run, base=base, listener=listener)
    write_certificate_page(certificate, find_subject(target, run).folder)
    return certificate


def show_certificate(certificate: Certificate, as_json: bool) -> None:
    """Prints it and ends the command with 1 if a check failed."""
    if as_json:
        print_json(certificate.to_dict())
    else:
        from trillora.report.certificate_table import show
        from trillora.report.safe_console import SafeConsole

        show(certificate, SafeConsole())
    if not certificate.passed:
        raise typer.Exit(EXIT_FAILED)
