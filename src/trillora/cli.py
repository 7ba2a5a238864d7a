"""The command line: its commands, and how errors are printed.

A command reads its arguments and calls the library. It imports what it needs when it runs, so that `--help` is fast.
Exit codes: 0 success, 1 preflight says NO-GO, 2 an error that the user can fix (printed without a traceback), 75 a run
was saved before its end and resumes with the same command, 76 a run diverged, 130 interrupted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import trillora
from trillora.errors import TrilloraError, nearest
from trillora.report.output import closed_pipe_safe, escape_unencodable, flush_output
from trillora.safe_text import visible

if TYPE_CHECKING:
    from trillora.evaluation.evaluate import Evaluation
    from trillora.events import Event, Listener

EXIT_NO_GO = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
OWN_PROCESS = "own process"  # the context's obj under `main`: nothing else runs in this process afterwards
OLD_VERBS = {"data": "inspect", "version": "--version"}
USAGE_ERROR = typer.BadParameter.__mro__[1]  # typer has no public name for it


class Verbs(TyperGroup):
    """Prints every error of a command as text, once, and exits with its code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _errors_as_text():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_text():
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0]
        if self.get_command(ctx, verb) is None:
            meant = OLD_VERBS.get(verb) or nearest(verb, self.list_commands(ctx))
            hint = f"did you mean {meant}? " if meant else ""
            raise TrilloraError(f"Unknown command '{verb}'.", where="command line", do=f"{hint}See `trillora --help`.")
        return super().resolve_command(ctx, args)


@contextmanager
def _errors_as_text() -> Iterator[None]:
    try:
        yield
    except TrilloraError as error:
        _print_error(str(error))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        _print_error("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except Exception as error:
        if not isinstance(error, USAGE_ERROR):
            raise
        command = error.ctx.command_path if error.ctx else "trillora"  # type: ignore[attr-defined]
        what = error.format_message()  # type: ignore[attr-defined]
        _print_error(str(TrilloraError(what, where=command, do=f"see `{command} --help`")))
        raise typer.Exit(EXIT_MISTAKE) from None


app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    rich_markup_mode=None,  # help without rich: importing it takes longer than everything else together
    pretty_exceptions_enable=False,  # a plain traceback is easier to copy into a bug report
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    help="LoRA fine-tuning of Hugging Face causal language models on TPU, GPU and CPU.",
)

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file that describes the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Options that replace those of the recipe, e.g. train.steps=10."),
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="Folder of a run; or a model: folder, hub id or smollm2.")
]
RunFolder = Annotated[Path, typer.Option("--out", "-o", metavar="RUN", help="Output folder of the run.")]
JsonEvents = Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Maximum length of an answer, in tokens.")]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="X", help="Sampling temperature; 0 picks the most likely token.")
]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", help="Nucleus sampling threshold (top-p).")]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="Random seed for sampling.")]
OnlyBase = Annotated[bool, typer.Option("--base", help="Use the run's base model without the adapter.")]


def _print_version(requested: bool) -> None:
    if requested:
        print(f"trillora {trillora.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
        raise typer.Exit(EXIT_MISTAKE)


@app.command()
def train(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    out: RunFolder,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume a run although its recipe, model or data has changed.")
    ] = False,
    as_json: JsonEvents = False,
) -> None:
    """Train an adapter, or resume an interrupted run.

    Exit code 75: the run was saved before its end. The same command resumes it.
    """
    from trillora.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    with _run_events(as_json, loaded.hardware.backend) as listener:
        from trillora.training import trainer
        from trillora.training.signals import EXIT_STOPPED

        result = trainer.train(loaded, out, listener=listener, accept_changes=accept_changes)
    if result.stopped is not None:
        raise typer.Exit(EXIT_STOPPED)


@app.command()
def preflight(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    on: Annotated[
        list[str],
        typer.Option("--on", metavar="SLICE", help="Slice to check: v5e-8, v6e-1, colab, kaggle. Repeat to compare."),
    ],
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Estimate without the TPU compiler: seconds, on any machine.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Compile to machine code: takes minutes instead of seconds.")
    ] = False,
    price: Annotated[
        float | None, typer.Option("--price", metavar="X", help="Price per chip-hour, used to estimate the cost.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ignore the cached answer.")] = False,
    as_json: JsonResult = False,
) -> None:
    """Check whether a run fits a TPU slice, and how long it takes.

    The TPU compiler compiles the training step on this machine. No TPU is needed. Exit code 1: NO-GO on every slice.
    """
    from trillora.recipe.load import load_recipe

    slices = _slices(on, overrides or ())
    loaded = load_recipe(recipe, overrides or ())
    with _progress_on_stderr() as listener:
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
        _print_json(shown[0] if len(shown) == 1 else shown)
    else:
        from rich.console import Console

        from trillora.report.preflight_screen import show

        show(results, Console(highlight=False))
    if all(result.verdict == "NO-GO" for result in results):
        raise typer.Exit(EXIT_NO_GO)


def _slices(on: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """The names of all --on options, each of which may hold several: ["v5e-8,v6e-8"] -> ["v5e-8", "v6e-8"]."""
    for word in overrides:
        if "=" not in word:
            do = f"name a slice with --on {word}, or set an option with KEY=VALUE"
            raise TrilloraError(f"'{word}' is not of the form KEY=VALUE.", where="trillora preflight", do=do)
    return [name.strip() for word in on for name in word.split(",") if name.strip()]


@app.command()
def inspect(
    context: typer.Context,
    recipe: RecipeFile,
    overrides: Overrides = None,
    as_json: JsonResult = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Also write the report as an HTML page.")
    ] = None,
    stage: Annotated[str | None, typer.Option("--stage", metavar="NAME", help="Inspect only this stage.")] = None,
) -> None:
    """Show the data of a recipe: rows, tokens, lengths.

    Exit code 2: a run would refuse this data.
    """
    from trillora.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    with _progress_on_stderr() as listener:
        from trillora.data.summary import inspect as summarise
        from trillora.recipe.schema import stages_of

        stages = [s for s in stages_of(loaded) if stage in (None, s.name)]
        if not stages:
            names = " ".join(s.name for s in stages_of(loaded))
            raise TrilloraError(f"There is no stage '{stage}'.", where="--stage", do=f"use one of: {names}")
        own = context.obj == OWN_PROCESS
        reports = {s.name: summarise(s.recipe, _only_progress(listener), hide_torch=own) for s in stages}
    for name, report in reports.items():
        if as_json:
            _print_json(report.to_dict())
        else:
            from rich.console import Console

            from trillora.report.data.screen import show

            if len(reports) > 1:
                print(f"Stage {name}")
            show(report, Console(highlight=False))
        if html is not None:
            from trillora.report.data.page import write_page

            file = html if len(reports) == 1 else html.with_stem(f"{html.stem}-{name}")
            write_page(report, file)
            print(f"Page written to {file}", file=sys.stderr)
    for report in reports.values():
        if (refusal := report.verdict.refusal()) is not None:
            if as_json:
                raise refusal
            raise typer.Exit(EXIT_MISTAKE)  # the report has shown the error


@app.command()
def generate(
    name: RunOrModel,
    *,
    prompts: Annotated[
        list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt to answer. May be repeated.")
    ],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    base: OnlyBase = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON.")] = False,
) -> None:
    """Answer prompts with a trained run or a model."""
    with _progress_on_stderr() as listener:
        from trillora.engine.sampling import Sampling
        from trillora.generation.generator import Generator

        generator = Generator.open(name, with_adapter=not base, listener=listener)
        sampling = Sampling(temperature, top_p, seed=seed)
        answers = generator.generate(prompts, max_tokens=max_tokens, sampling=sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        if as_json:
            counts = {"num_prompt_tokens": answer.num_prompt_tokens, "num_tokens": len(answer.tokens)}
            _print_json({"prompt": prompt, "text": answer.text, **counts, "stopped": answer.stopped})
        else:
            print(f"> {prompt}\n{answer.text}\n" if len(prompts) > 1 else answer.text)


@app.command()
def chat(
    name: RunOrModel,
    *,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    base: OnlyBase = False,
) -> None:
    """Chat with a trained run or a model."""
    with _progress_on_stderr() as listener:
        from trillora.engine.sampling import Sampling
        from trillora.generation.chat import converse
        from trillora.generation.generator import Generator

        generator = Generator.open(name, with_adapter=not base, listener=listener)

    def say(text: str) -> None:
        print(text, end="", flush=True)

    converse(
        generator, lambda: input("> "), say, max_tokens=max_tokens, sampling=Sampling(temperature, top_p, seed=seed)
    )


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.")],
    *,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Rows to evaluate on (default: those held out of the run)."),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", help="Evaluate N evenly spaced rows (default: all).")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            help="Maximum length of an answer, in tokens (default: fits the longest expected).",
        ),
    ] = None,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="Evaluate only the adapter, which takes half the time.")
    ] = False,
    as_json: JsonResult = False,
) -> None:
    """Evaluate a trained run and its base model on held-out rows."""
    with _progress_on_stderr() as listener:
        from trillora.evaluation import evaluate as evaluation

        result = evaluation.evaluate(
            run, data, max_rows=rows, max_tokens=max_tokens, with_base=not no_base, listener=listener
        )
    _show_evaluation(result, as_json)


@app.command()
def quickstart(out: RunFolder = Path("runs/quickstart"), as_json: JsonEvents = False) -> None:
    """Train a small model offline, in minutes on a laptop."""
    with _run_events(as_json) as listener:
        from trillora.quickstart import run as lesson
        from trillora.training.signals import EXIT_STOPPED

        result, evaluation = lesson.run(out, listener)
    if evaluation is None:
        raise typer.Exit(EXIT_STOPPED)
    _show_evaluation(evaluation, as_json)
    if not as_json:
        print(lesson.next_steps(result.run))


@app.command()
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
        _print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        from trillora.report.console import show_findings

        show_findings(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(EXIT_MISTAKE)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")]) -> None:
    """Write a run's report.html again and print its path."""
    from trillora.report.run.write import write_report

    print(write_report(run))


@app.command()
def schema() -> None:
    """Print the JSON Schema of recipes, for editors."""
    from trillora.recipe.load import recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))


@contextmanager
def _run_events(as_json: bool, backend: str = "auto") -> Iterator[Listener]:
    """Shows the events of a run on stdout, for people or as JSON."""
    from trillora.devices.quiet import quiet_libraries

    quiet_libraries(backend)
    if as_json:
        yield _print_event
        return
    from trillora.report.console import console_listener

    with console_listener() as listener:
        yield listener


@contextmanager
def _progress_on_stderr() -> Iterator[Listener]:
    """Shows events on stderr, for commands whose result goes to stdout."""
    from rich.console import Console

    from trillora.devices.quiet import quiet_libraries
    from trillora.report.console import console_listener

    quiet_libraries()
    escape_unencodable()
    with console_listener(Console(stderr=True, highlight=False)) as listener:
        yield listener


def _only_progress(listener: Listener) -> Listener:
    """Drops all other events: the report has their content."""
    from trillora.events import Progress

    def listen(event: Event) -> None:
        if isinstance(event, Progress):
            listener(event)

    return listen


def _show_evaluation(evaluation: Evaluation, as_json: bool) -> None:
    if as_json:
        _print_json(evaluation.to_dict())
        return
    from rich.console import Console

    from trillora.report.eval_table import show

    show(evaluation, Console(highlight=False))


def _print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def _print_event(event: Event) -> None:
    from trillora.events import to_json

    print(to_json(event), file=closed_pipe_safe(sys.stdout), flush=True)


def _print_error(text: str) -> None:
    print(visible(text), file=closed_pipe_safe(sys.stderr))


def main() -> None:
    """Entry point of the `trillora` script."""
    try:
        app(prog_name="trillora", obj=OWN_PROCESS)
    finally:
        flush_output()
