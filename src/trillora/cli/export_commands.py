"""The command that takes a trained adapter elsewhere: export."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trillora.cli.options import JsonResult, TrustCode
from trillora.cli.output import print_json, progress_on_stderr
from trillora.errors import TrilloraError
from trillora.export.kinds import FOLDERS, check_kind, default_folder, export_as

if TYPE_CHECKING:
    from trillora.certify.certificate import Certificate
    from trillora.export.source import Exported

KINDS = (*FOLDERS, "hub")

StoredType = Annotated[
    str | None,
    typer.Option(
        "--type",
        metavar="TYPE",
        help="gguf, ollama: f16, q8_0, q4_0, … (default: f16 and q8_0). merged: float32, float16 or bfloat16 "
        "(default: the base's).",
    ),
]


def export(
    name: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run or of an adapter.")],
    *,
    to: Annotated[str, typer.Option("--to", metavar="KIND", help=f"One of {', '.join(KINDS)}.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="New folder (default: RUN/exports/KIND).")
    ] = None,
    type: StoredType = None,
    adapter: Annotated[
        str | None, typer.Option("--adapter", metavar="NAME", help="Which adapter of the run: its name or folder.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="MODEL", help="The base model, if it is not the one of the run.")
    ] = None,
    checkpoints: Annotated[
        str | None,
        typer.Option("--checkpoints", metavar="FOLDER|URL", help="Of a run that has not finished: its checkpoints."),
    ] = None,
    repo: Annotated[str | None, typer.Option("--repo", metavar="ORG/NAME", help="For hub: the repository.")] = None,
    what: Annotated[str, typer.Option("--what", metavar="WHAT", help="For hub: adapter or merged.")] = "adapter",
    private: Annotated[bool, typer.Option("--private/--public", help="For hub: who can read it.")] = True,
    with_certificate: Annotated[
        bool, typer.Option("--certify/--no-certify", help="Check that the export is what was trained.")
    ] = True,
    trust: TrustCode = False,
    as_json: JsonResult = False,
) -> None:
    """Export an adapter: merged, as GGUF, for Ollama or to the hub."""
    check_kind(to, KINDS)
    overrides = _overrides(trust, checkpoints)
    if to == "hub":
        _to_hub(name, adapter, base, repo, what, private=private, overrides=overrides, as_json=as_json)
        return
    for option, given in (("--repo", repo is not None), ("--what", what != "adapter"), ("--public", not private)):
        if given:
            raise TrilloraError(f"{option} is for --to hub.", where=option, do="remove it, or use --to hub")
    with progress_on_stderr(as_json=as_json) as listener:
        from trillora.early.runs import check_exportable

        check_exportable(name, adapter, overrides)
        from trillora.export.source import open_source
        from trillora.files.user_path import user_path

        source = open_source(name, adapter=adapter, base=base, overrides=overrides, listener=listener)
        folder = default_folder(source, to, type) if out is None else user_path(out, where="--out")
        exported = export_as(to, source, folder, type=type, listener=listener)
        certificate = None
        why_not = _why_not_certified(to, trust)
        if with_certificate and why_not is None:
            from trillora.cli.certify_commands import certify_with_page

            certificate = certify_with_page(exported.folder, run=source.adapter, base=base, listener=listener)
    _show(exported, certificate, as_json)
    if with_certificate and why_not is not None and not as_json:
        print(f"Not certified: {why_not}.")


def _why_not_certified(to: str, trust: bool) -> str | None:
    if trust:
        return "a certificate runs no code of the model"
    return "its base is a text model in another folder than the run's" if to == "text-adapter" else None


def _to_hub(
    name: str,
    adapter: str | None,
    base: str | None,
    repo: str | None,
    what: str,
    *,
    private: bool,
    overrides: tuple[str, ...],
    as_json: bool,
) -> None:
    if what not in ("adapter", "merged"):
        raise TrilloraError(f"'{what[:40]}' cannot be pushed.", where="--what", do="use adapter or merged")
    if repo is None:
        raise TrilloraError("Where to push is not given.", where="--repo", do="add --repo ORG/NAME")
    from trillora.export.hub import adapter_to_push, check_repo, model_to_push, push, token_of_environment

    check_repo(repo)
    token = token_of_environment()  # before the work
    with progress_on_stderr(as_json=as_json) as listener:
        import tempfile

        from trillora.early.runs import check_exportable

        check_exportable(name, adapter, overrides)
        from trillora.export.merged import export_merged
        from trillora.export.source import open_source

        opened = base if what == "merged" else None  # to name the base of an adapter, it need not be opened
        source = open_source(name, adapter=adapter, base=opened, overrides=overrides, listener=listener)
        if what == "adapter":
            pushed = push(adapter_to_push(source, base), repo, token=token, private=private, listener=listener)
        else:
            parent = source.run if source.run is not None else source.adapter.parent
            with tempfile.TemporaryDirectory(prefix=".merged-", dir=parent) as folder:
                export_merged(source, Path(folder) / "merged", listener=listener)
                files = model_to_push(Path(folder) / "merged")
                pushed = push(files, repo, token=token, private=private, listener=listener)
    if as_json:
        print_json(asdict(pushed))
        return
    readers = "only you and your organisation can read it" if pushed.is_private else "everybody can read it"
    print(f"Pushed {len(pushed.files)} files to {pushed.url} ({readers}).")


def _overrides(trust: bool, checkpoints: str | None) -> tuple[str, ...]:
    code = ("model.trust_remote_code=true",) if trust else ()
    return code if checkpoints is None else (*code, f"train.checkpoint_dir={checkpoints}")


def _show(exported: Exported, certificate: Certificate | None, as_json: bool) -> None:
    from trillora.cli.certify_commands import EXIT_FAILED

    is_bad = certificate is not None and not certificate.passed
    if as_json:
        found = None if certificate is None else certificate.to_dict()
        print_json({**asdict(exported), "folder": str(exported.folder), "certificate": found})
        raise typer.Exit(EXIT_FAILED if is_bad else 0)
    for note in exported.notes:
        print(note)
    size = exported.num_bytes
    shown = f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
    print(f"Exported to {exported.folder}: {', '.join(exported.files)} ({shown})")
    if certificate is not None:
        from trillora.report.certificate_table import show_short
        from trillora.report.safe_console import SafeConsole

        show_short(certificate, SafeConsole())
    if is_bad:
        raise typer.Exit(EXIT_FAILED)
