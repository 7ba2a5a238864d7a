"""The commands of the first hour: quickstart, new, doctor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from trillora.cli.errors import EXIT_MISTAKE
from trillora.cli.options import JsonEvents, JsonResult, RunFolder
from trillora.cli.output import print_json, progress_on_stderr, run_events, show_evaluation, show_stopped
from trillora.errors import EXIT_STOPPED, TrilloraError
from trillora.own_command import runnable

EXIT_REFUSED = 1


def quickstart(context: typer.Context, out: RunFolder = Path("runs/quickstart"), as_json: JsonEvents = False) -> None:
    """Train a small model offline, in minutes on a laptop."""
    with run_events(as_json) as listener:
        from trillora.devices.quiet import start_gpu
        from trillora.early.model import check_model
        from trillora.recipe.schema import EMBEDDED, ModelSection

        check_model(ModelSection(name=EMBEDDED))
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


def new(
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Base model: smollm2, a Hugging Face id or a folder.")
    ] = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE", help="File with the rows to train on.")] = None,
    on: Annotated[
        str | None, typer.Option("--on", metavar="PLACE", help="auto, cpu, gpu, tpu, colab or kaggle (default: auto).")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT", help="System prompt of every row (default: none).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="RUN", help="Folder of the run (default: runs/NAME).")
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option("--recipe", metavar="FILE", help="The recipe to write (default: NAME.yaml).")
    ] = None,
) -> None:
    """Write a recipe from the answers to five questions.

    What is not given as an option is asked, if this is a terminal.
    """
    from trillora.early.new import PLACES, NewRecipe, check_place, new_recipe, next_commands
    from trillora.files.user_path import user_path
    from trillora.recipe.load import load_recipe

    is_asked = sys.stdin.isatty()
    if missing := [name for name, given in (("--model", model), ("--data", data)) if given is None and not is_asked]:
        do = "give them as options: trillora new --model smollm2 --data qa.csv"
        raise TrilloraError(f"{' and '.join(missing)} not given, and this is no terminal to ask.", where="new", do=do)

    def ask(question: str, given: str | None, default: str | None) -> str:
        if given is not None:
            return given
        return str(typer.prompt(question, default=default)) if is_asked else default or ""

    model = ask("Base model (smollm2, a Hugging Face id or a folder)", model, "smollm2")
    data = ask("File with the rows to train on", data, None)
    name = Path(data).name.partition(".")[0] or "recipe"
    place = check_place(ask(f"Where does it run ({', '.join(PLACES)})", on, "auto"))
    system = ask("System prompt for every row (empty: none)", system, "")
    run = Path(ask("Folder of the run", None if out is None else str(out), f"runs/{name}"))
    file = user_path(recipe or f"{name}.yaml", where="--recipe")
    answers = NewRecipe(model, data, place, system, run)
    text = new_recipe(answers, file.absolute().parent)
    _write_new(file, text)
    load_recipe(file)
    print(f"Recipe written to {file}")
    for what, command in next_commands(answers, file):
        print(f"{what:<17} {runnable(command)}")


def _write_new(file: Path, text: str) -> None:
    """A recipe that is there already, with other content, stays."""
    from trillora.files.atomic import make_folder, write_file

    if file.exists() and file.read_text("utf-8") != text:
        do = "choose another file with --recipe, or rename this one"
        raise TrilloraError("There is another file with this name.", where=str(file), do=do)
    make_folder(file.parent)
    write_file(file, text)


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
