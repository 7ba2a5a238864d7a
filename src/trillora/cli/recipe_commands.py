"""The commands that read a recipe: train, preflight, inspect; and its schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trillora.cli.errors import EXIT_MISTAKE, OWN_PROCESS
from trillora.cli.options import (
    JsonEvents,
    JsonResult,
    Overrides,
    RecipeFile,
    RecipeOrData,
    RunFolder,
    Tiny,
    parse_price,
)
from trillora.cli.output import only_progress, print_json, progress_on_stderr, run_events, show_stopped
from trillora.errors import EXIT_STOPPED, TrilloraError
from trillora.safe_text import visible_line

if TYPE_CHECKING:
    from trillora.data.summary import DataReport
    from trillora.recipe.schema import Recipe

EXIT_NO_GO = 1


def train(
    context: typer.Context,
    recipe: RecipeOrData,
    overrides: Overrides = None,
    *,
    out: RunFolder,
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Base model, if a data file is given, not a recipe.")
    ] = None,
    tiny: Tiny = False,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume a run although its recipe, model or data has changed.")
    ] = False,
    as_json: JsonEvents = False,
) -> None:
    """Train an adapter, or resume an interrupted run.

    Exit code 75: the run was saved before its end. The same command resumes it. A data file in place of a recipe trains
    with the default options; the run's folder then gets the recipe.
    """
    from trillora.early.from_data import is_data_file
    from trillora.recipe.load import load_recipe
    from trillora.recipe.tiny import is_tiny_run

    source = _options(recipe, model)
    loaded = load_recipe(source, overrides or (), tiny=tiny or is_tiny_run(out))
    with run_events(as_json, loaded.hardware.backend, loaded.track.every_steps) as listener:
        from trillora.devices.quiet import start_gpu
        from trillora.early.training import check_start

        check_start(loaded, out)
        start_gpu(loaded.hardware.backend)
        from trillora.training import trainer

        before, is_done = _saved_recipe(out), False
        try:
            result = trainer.train(loaded, out, listener=listener, accept_changes=accept_changes)
            is_done = True
        finally:
            if is_data_file(recipe) and (is_done or _saved_recipe(out) != before):  # not of a run that was refused
                _write_recipe(loaded, recipe, out)
    if result.stopped is not None:
        show_stopped(result.run, context, as_json)
        raise typer.Exit(EXIT_STOPPED)
    if not as_json:
        from trillora.report.run.next_steps import after_training

        print(after_training(result.run, loaded), end="")


def _options(recipe: Path, model: str | None) -> Path | dict[str, Any]:
    """The recipe, or the options that a data file and a model make one of."""
    from trillora.early.from_data import is_data_file

    if model is None and is_data_file(recipe):
        do = "add --model MODEL: smollm2 (embedded), a Hugging Face id or a folder"
        raise TrilloraError(f"{recipe.name} is a data file, and no model is given.", where="--model", do=do)
    return _recipe_of(recipe, model)


def _saved_recipe(run: Path) -> bytes:
    """What the run was started with; empty if it was not."""
    from trillora.runs.files import RECIPE_FILE

    file = run / RECIPE_FILE
    return file.read_bytes() if file.is_file() else b""


def _write_recipe(recipe: Recipe, data: Path, run: Path) -> None:
    """The recipe of a run that was started with a data file, unless nothing of the run was written."""
    from trillora.early.from_data import recipe_text
    from trillora.files.atomic import write_file
    from trillora.report.run.next_steps import OWN_RECIPE
    from trillora.runs.files import is_run

    if is_run(run):
        write_file(
            run / OWN_RECIPE,
            recipe_text(recipe, f"Made of {visible_line(data.name)}. docs/recipes.md has all options."),
        )


def preflight(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    on: Annotated[
        list[str],
        typer.Option("--on", metavar="SLICE", help="Slice to check: v5e-8, v6e-1, colab, kaggle. Repeat to compare."),
    ],
    tiny: Tiny = False,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate without the TPU compiler: seconds, on any machine.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Compile to machine code: takes minutes instead of seconds.")
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(
            "--price", metavar="X", parser=parse_price, help="Price per chip-hour, used to estimate the cost."
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore the cached answer.")] = False,
    as_json: JsonResult = False,
) -> None:
    """Check whether a run fits a TPU slice, and how long it takes.

    The TPU compiler compiles the training step on this machine. No TPU is needed. Exit code 1: NO-GO on every slice.
    """
    from trillora.recipe.load import load_recipe

    slices = _slices(on, overrides or ())
    loaded = load_recipe(recipe, overrides or (), tiny=tiny)
    with progress_on_stderr(as_json=as_json) as listener:
        from trillora.devices.slices import find_slice
        from trillora.early.training import check_files_of

        for name in slices:
            find_slice(name)
        check_files_of(loaded)
        from trillora.preflight.verdict import preflight as check

        results = check(
            loaded,
            slices,
            estimate=estimate,
            whole=whole,
            price_per_hour=price,
            use_cache=not fresh,
            listener=listener,
        )
    if as_json:
        shown = [result.to_dict() for result in results]
        print_json(shown[0] if len(shown) == 1 else shown)
    else:
        from trillora.report.preflight_screen import show
        from trillora.report.safe_console import SafeConsole

        show(results, SafeConsole())
    if all(result.verdict == "NO-GO" for result in results):
        raise typer.Exit(EXIT_NO_GO)


def _slices(on: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The names of all --on options, each of which may hold several: ["v5e-8,v6e-8"] -> ["v5e-8", "v6e-8"]."""
    for word in overrides:
        if "=" not in word:
            do = f"name a slice with --on {word}, or set an option with KEY=VALUE"
            raise TrilloraError(f"'{word}' is not of the form KEY=VALUE.", where="trillora preflight", do=do)
    return [name.strip() for word in on for name in word.split(",") if name.strip()]


def inspect(
    context: typer.Context,
    recipe: Annotated[
        Path,
        typer.Argument(metavar="RECIPE|FILE", help="YAML file that describes the run; or a data file to look at."),
    ],
    overrides: Overrides = None,
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="Model whose tokenizer is used for a data file (smollm2)."),
    ] = None,
    row: Annotated[
        str | None,
        typer.Option("--row", metavar="N|FILE:LINE", help="Show only this row: its number, or its place in a file."),
    ] = None,
    tiny: Tiny = False,
    as_json: JsonResult = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the report as an HTML page.")
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", metavar="NAME", help="Inspect only this stage.")] = None,
) -> None:
    """Show the data of a recipe: rows, tokens, lengths. A data file needs no recipe.

    Exit code 2: a run would refuse this data.
    """
    from trillora.recipe.load import load_recipe

    loaded = load_recipe(_recipe_of(recipe, model), overrides or (), tiny=tiny)
    with progress_on_stderr(as_json=as_json) as listener:
        from trillora.early.training import check_files_of
        from trillora.recipe.schema import stages_of

        check_files_of(loaded)
        from trillora.data.summary import inspect as summarize

        stages = [s for s in stages_of(loaded) if stage in (None, s.name)]
        if not stages:
            names = " ".join(s.name for s in stages_of(loaded))
            raise TrilloraError(f"There is no stage '{stage}'.", where="--stage", do=f"use one of: {names}")
        own = context.obj == OWN_PROCESS
        reports = {s.name: summarize(s.recipe, only_progress(listener), row=row, hide_torch=own) for s in stages}
    for name, report in reports.items():
        if as_json:
            print_json(report.to_dict())
        else:
            _show(report, name if len(reports) > 1 else None, only_examples=row is not None)
        if html is not None:
            _write_page(report, html if len(reports) == 1 else html.with_stem(f"{html.stem}-{name}"))
    for report in reports.values() if row is None else ():
        if (refusal := report.verdict.refusal()) is not None:
            if as_json:
                raise refusal
            raise typer.Exit(EXIT_MISTAKE)  # the report has shown the error


def _show(report: DataReport, stage: str | None, *, only_examples: bool) -> None:
    from trillora.report.data.screen import show, show_examples
    from trillora.report.safe_console import SafeConsole

    if stage is not None:
        print(f"Stage {stage}")
    (show_examples if only_examples else show)(report, SafeConsole())


def _write_page(report: DataReport, file: Path) -> None:
    from trillora.report.data.page import write_page

    write_page(report, file)
    print(f"Page written to {file}", file=sys.stderr)


def _recipe_of(file: Path, model: str | None) -> Path | dict[str, Any]:
    """The recipe, or for a data file one that has all rows of it."""
    from trillora.early.from_data import is_data_file, options_from_data

    if is_data_file(file):
        return options_from_data(file) if model is None else options_from_data(file, model)
    if model is not None:
        do = f"remove --model, or replace the recipe's model with model={model}"
        raise TrilloraError("--model is for a data file; a recipe names its model.", where="--model", do=do)
    return file


def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from trillora.recipe.load import recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))
