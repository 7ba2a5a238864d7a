"""The commands that take a recipe to rented hardware: launch colab, launch kaggle, launch tpu-vm."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trillora.cli import tpu_vm_commands
from trillora.cli.export_commands import KINDS
from trillora.cli.options import JsonResult, Overrides, RecipeFile, Tiny, number_parser
from trillora.cli.output import print_json, progress_on_stderr
from trillora.errors import TrilloraError
from trillora.own_command import runnable

if TYPE_CHECKING:
    from trillora.events import Listener
    from trillora.launch.bundle import Bundle
    from trillora.launch.notebooks.kaggle_client import KaggleClient
    from trillora.launch.notebooks.targets import Target
    from trillora.preflight.result import PreflightResult

EXPORTS = (*(kind for kind in KINDS if kind != "hub"), "none")

launch = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Take a recipe to Colab, Kaggle or a Cloud TPU.",
)

OutFolder = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="New folder for the files of the launch.")
]
Force = Annotated[bool, typer.Option("--force", help="Launch although preflight says NO-GO.")]
Export = Annotated[
    str, typer.Option("--export", metavar="KIND", help=f"What the notebook exports: {', '.join(EXPORTS)}.")
]


@launch.command()
def colab(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    out: OutFolder = None,
    on: Annotated[
        str, typer.Option("--on", metavar="MACHINE", help="colab (TPU v5e-1), colab-v6e (TPU, paid) or t4 (GPU).")
    ] = "colab",
    tiny: Tiny = False,
    force: Force = False,
    export: Export = "merged",
    run: Annotated[
        bool,
        typer.Option("--run", help="Run the notebook on Colab with Google's program `colab`, and fetch the results."),
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="With --run: do not give the runtime back at the end.")] = False,
    send_token: Annotated[
        bool, typer.Option("--send-token", help="With --run: send this machine's Hugging Face token, for gated models.")
    ] = False,
    as_json: JsonResult = False,
) -> None:
    """Write a notebook that trains the recipe on Colab: on a TPU, or on a T4 with --on t4.

    Without --run nothing is started: the commands of Google's program are only printed.
    """
    _check_export(export)
    with progress_on_stderr() as listener:
        from trillora.launch.notebooks.colab import ColabRun, require_program, write_colab
        from trillora.launch.notebooks.targets import find_target

        target = find_target("colab", on)
        if run:
            require_program(target)
        token = _token() if send_token else None
        bundle, _ = _ready(recipe, overrides, target, tiny, force, listener)
        folder = _folder(out, f"{bundle.name}-colab")
        files = write_colab(bundle, folder, target, export=export, listener=listener)
        result = ColabRun(files, listener, token=token, keep=keep).run() if run else None
    steps = [] if run or target.backend != "tpu" else files.steps(send_token=send_token, keep=keep)
    commands = [shlex.join(words) for _, words in steps]
    if as_json:
        placed = str(files.bundle) if files.bundle else None
        print_json({"notebook": str(files.notebook), "bundle": placed, "commands": commands, "result": result})
        return
    print(f"Notebook: {files.notebook}")
    if result is not None:
        print(f"State: {result['state']}. Results: {files.results}")
        return
    if files.bundle is not None:
        print(f"Upload {files.bundle} to the folder `trillora` of your Google Drive.")
    print("Open it at https://colab.research.google.com (File > Upload notebook) and run all cells.")
    if commands:
        print("Or with --run, through Google's program, without Drive:", *commands, sep="\n  ")


@launch.command()
def kaggle(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    out: OutFolder = None,
    on: Annotated[
        str, typer.Option("--on", metavar="MACHINE", help="kaggle (TPU v5e-8) or 2xt4 (two GPUs).")
    ] = "kaggle",
    owner: Annotated[str | None, typer.Option("--owner", metavar="NAME", help="Your name on Kaggle.")] = None,
    sessions: Annotated[
        int | None,
        typer.Option(
            "--sessions",
            metavar="N",
            parser=number_parser(int, 1, 50),
            help="Kernels in the chain; each resumes the last one (default: what preflight expects).",
        ),
    ] = None,
    tiny: Tiny = False,
    force: Force = False,
    export: Export = "none",
    push: Annotated[bool, typer.Option("--push", help="Start the next session on Kaggle.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Show the sessions of the folder.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help="Download the output of the last session.")] = False,
    as_json: JsonResult = False,
) -> None:
    """Write a kernel and a data set that train the recipe on Kaggle: on its TPU, or on two T4 with --on 2xt4.

    Without --push nothing is uploaded. --push, --status and --pull use the folder that an earlier command wrote. If
    there is none, --push writes it first.
    """
    _check_export(export)
    if push + status + pull > 1:
        what = "--push, --status and --pull are different commands."
        raise TrilloraError(what, where="trillora launch kaggle", do="give only one of them")
    with progress_on_stderr() as listener:
        from trillora.launch.bundle import slug
        from trillora.launch.notebooks.kaggle import find_owner, open_kaggle, write_kaggle
        from trillora.launch.notebooks.kaggle_client import KaggleClient, require_program
        from trillora.launch.notebooks.targets import find_target

        target = find_target("kaggle", on)
        if push or status or pull:
            require_program()
        folder = _folder(out, f"{slug(recipe.stem)}-kaggle")
        if status or pull or (push and folder.is_dir()):
            files = open_kaggle(folder)
        else:
            user = find_owner(owner)
            bundle, checked = _ready(recipe, overrides, target, tiny, force, listener)
            expected = checked.run.sessions if checked is not None and checked.run is not None else 1
            options: dict[str, Any] = {"sessions": sessions or expected, "export": export, "listener": listener}
            files = write_kaggle(bundle, folder, user, target, **options)
        if push or status or pull:
            _use_client(KaggleClient(files, listener), as_json, push=push, pull=pull)
            return
    command = shlex.join(["trillora", "launch", "kaggle", str(recipe), "--out", str(folder), "--push"])
    kernels = [str(files.session(number)) for number in range(1, files.num_sessions + 1)]
    lines = [f"Data set: {files.dataset}", *(f"Kernel: {kernel}" for kernel in kernels)]
    _say({"dataset": str(files.dataset), "kernels": kernels}, as_json, *lines, f"Start it: {runnable(command)}")


def _use_client(client: KaggleClient, as_json: bool, *, push: bool, pull: bool) -> None:
    if push:
        kernel = client.push()
        _say({"pushed": kernel}, as_json, f"Started: https://www.kaggle.com/code/{kernel}")
    elif pull:
        folder = client.pull()
        _say({"results": str(folder)}, as_json, f"Results: {folder}")
    else:
        found = client.status()
        lines = [
            f"Session {s.number}: {', '.join(filter(None, (s.kaggle or 'not pushed', s.state, s.device)))}"
            for s in found
        ]
        _say({"sessions": [asdict(session) for session in found]}, as_json, *lines)


launch.command("tpu-vm")(tpu_vm_commands.tpu_vm)


def _ready(
    recipe: Path, overrides: Sequence[str] | None, target: Target, tiny: bool, force: bool, listener: Listener
) -> tuple[Bundle, PreflightResult | None]:
    """The bundle of a recipe that fits the machine, and preflight's answer; None for a GPU, which it does not know."""
    from trillora.events import Note
    from trillora.launch.bundle import make_bundle
    from trillora.launch.go import require_go

    bundle = make_bundle(recipe, overrides or (), tiny=tiny, set_name=target.packages, listener=listener)
    if target.slice_name is None:
        listener(
            Note(f"Preflight knows TPUs only: whether the recipe fits {target.chips} shows when the run compiles.")
        )
        return bundle, None
    return bundle, require_go(bundle.recipe, target.slice_name, force=force, listener=listener)


def _say(facts: dict[str, Any], as_json: bool, *lines: str) -> None:
    if as_json:
        print_json(facts)
    else:
        print(*lines, sep="\n")


def _folder(out: Path | None, default: str) -> Path:
    from trillora.files.user_path import user_path

    return Path(default) if out is None else user_path(out, where="--out")


def _token() -> str:
    from trillora.export.hub import token_of_environment

    return token_of_environment()


def _check_export(kind: str) -> None:
    if kind not in EXPORTS:
        raise TrilloraError(f"There is no export to '{kind[:40]}'.", where="--export", do=f"use {', '.join(EXPORTS)}")
