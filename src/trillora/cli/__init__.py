"""The command line: its commands, and how errors are printed.

A command reads its arguments and calls the library. It imports what it needs when it runs, so that `--help` is fast.
Everything that is printed passes `guarded_output`. Errors are printed without a traceback; `--traceback` shows it.
Exit codes: 0 success, 1 preflight says NO-GO or a certificate failed, 2 an error that the user can fix, 3 a condition
of `trillora eval --gate` does not hold, 70 a bug of Trillora, 75 a run was saved before its end and resumes with the
same command, 76 a run diverged, 130 interrupted.
"""

from __future__ import annotations

import gc
from typing import Annotated

import typer

import trillora
from trillora.cli import (
    adapter_commands,
    certify_commands,
    export_commands,
    launch_commands,
    recipe_commands,
    run_commands,
    serve_commands,
    setup_commands,
    shipped_commands,
)
from trillora.cli.errors import EXIT_MISTAKE, OWN_PROCESS, TRACEBACK, Verbs
from trillora.report.output import flush_output
from trillora.training.signals import ignore_after_stop

# Objects until the garbage collector looks at them. Importing jax and transformers creates a million that stay: with
# Python's own 700, an eighth of the time to start is spent on looking at them again and again.
GARBAGE_THRESHOLD = 100_000
TRACEBACK_HELP = "Show the traceback of an error, as TRILLORA_TRACEBACK=1 does."

app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,  # help without rich: importing it takes longer than everything else together
    pretty_exceptions_enable=False,  # a plain traceback is easier to copy into a bug report
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    help="LoRA fine-tuning of Hugging Face causal language models on TPU, GPU and CPU.",
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"trillora {trillora.__version__}")
        raise typer.Exit


def _note_traceback(context: typer.Context, requested: bool) -> None:
    context.meta[TRACEBACK] = context.meta.get(TRACEBACK, False) or requested


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    show_traceback: Annotated[
        bool,
        typer.Option("--traceback", callback=_note_traceback, expose_value=False, help=TRACEBACK_HELP),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_MISTAKE)


# In the order of --help.
app.command()(recipe_commands.train)
app.command()(recipe_commands.preflight)
app.command()(recipe_commands.inspect)
app.add_typer(launch_commands.launch, name="launch")
app.command()(run_commands.generate)
app.command()(run_commands.chat)
app.command()(serve_commands.serve)
app.command("eval")(run_commands.evaluate)
app.command()(adapter_commands.merge)
app.command()(export_commands.export)
app.command()(certify_commands.certify)
app.command()(certify_commands.verify)
app.command()(setup_commands.quickstart)
app.command()(setup_commands.new)
app.command()(setup_commands.doctor)
app.command()(run_commands.report)
app.add_typer(shipped_commands.recipes, name="recipes")
app.command()(recipe_commands.schema)


def main() -> None:
    """Entry point of the `trillora` script."""
    ignore_after_stop()
    gc.set_threshold(GARBAGE_THRESHOLD)
    try:
        app(prog_name="trillora", obj=OWN_PROCESS)
    finally:
        flush_output()
