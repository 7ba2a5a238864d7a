"""The command line: its commands, and how errors are printed.

A command reads its arguments and calls the library. It imports what it needs when it runs, so that `--help` is fast.
Everything that is printed passes `guarded_output`. Errors are printed without a traceback; `--traceback` shows it.
Exit codes: 0 success, 1 preflight says NO-GO, 2 an error that the user can fix, 70 a bug of Trillora, 75 a run was
saved before its end and resumes with the same command, 76 a run diverged, 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

import trillora
from trillora.errors import Bug, TrilloraError, as_error, nearest
from trillora.report.output import closed_pipe_safe, flush_output, guarded_output, masked
from trillora.safe_text import visible
from trillora.secrets import mask_message, secrets_of_url
from trillora.training.signals import ignore_after_stop

if TYPE_CHECKING:
    from trillora.evaluation.evaluate import Evaluation
    from trillora.events import Event, Listener

EXIT_NO_GO = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130
OWN_PROCESS = "own process"  # the context's obj under `main`: nothing else runs in this process afterwards
TRACEBACK = "show_traceback"  # the option, and its value in the context
TRACEBACK_HELP = "Show the traceback of an error, as TRILLORA_TRACEBACK=1 does."
ANYWHERE = {"doctor", "schema"}  # verbs that work in a folder with any name
OLD_VERBS = {"data": "inspect", "version": "--version"}
USAGE_ERROR = typer.BadParameter.__mro__[1]  # typer has no public name for it


class Verbs(TyperGroup):
    """Prints every error of a command as text, once, and exits with its code. Untrusted text is printed as escapes."""

    def main(self, *args: Any, **options: Any) -> Any:
        with guarded_output():
            return super().main(*args, **options)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["command"] = ["trillora", *args]
        with _errors_as_text(ctx):
            for argument in args:
                _check_text(argument, "An argument", where=argument)
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _errors_as_text(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb = args[0]
        if self.get_command(ctx, verb) is None:
            meant = OLD_VERBS.get(verb) or nearest(verb, self.list_commands(ctx))
            hint = f"did you mean {meant}? " if meant else ""
            raise TrilloraError(f"Unknown command '{verb}'.", where="command line", do=f"{hint}See `trillora --help`.")
        if verb not in ANYWHERE:
            _check_folder()
        name, command, rest = super().resolve_command(ctx, args)
        assert command is not None
        shared = [option for option in self.params if option.name == TRACEBACK]  # may stand before or after the verb
        command.params += [option for option in shared if option not in command.params]
        return name, command, rest


@contextmanager
def _errors_as_text(ctx: Any) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _print_error("interrupted", ctx)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except typer.Exit:
        raise
    except Exception as error:
        if isinstance(error, USAGE_ERROR):
            command = error.ctx.command_path if error.ctx else "trillora"  # type: ignore[attr-defined]
            what = error.format_message()  # type: ignore[attr-defined]
            shown = TrilloraError(what, where=command, do=f"see `{command} --help`")
        elif isinstance(error, OSError) and error.errno == errno.EPIPE:
            raise  # the reader of the output is gone; typer exits silently
        else:
            shown = as_error(error)
        if ctx.meta.get(TRACEBACK) or os.environ.get("TRILLORA_TRACEBACK", "0") not in ("", "0"):
            _print_error("".join(traceback.format_exception(error)).rstrip(), ctx)
        _print_error(f"{shown}{_for_the_report(ctx)}" if isinstance(shown, Bug) else str(shown), ctx)
        raise typer.Exit(shown.exit_code) from None


def _for_the_report(ctx: Any) -> str:
    """What the developers need to know about a bug."""
    versions = f"trillora {trillora.__version__}, Python {platform.python_version()}, {platform.platform()}"
    command = shlex.join(ctx.find_root().meta["command"])
    return f"\n         {command}\n         {versions}\n         the output of the same command with --traceback"


def _check_text(text: str, name: str, where: str | None = None) -> None:
    """Refuses text that is not UTF-8. Python reads other bytes as characters that most libraries cannot write."""
    if "\0" in text:
        raise TrilloraError(f"{name} contains a NUL character.", where=where, do="remove it")
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        encoding = sys.getfilesystemencoding()
        do = "use UTF-8" if encoding == "utf-8" else f"set PYTHONUTF8=1: the encoding of this terminal is {encoding}"
        raise TrilloraError(f"{name} is not valid {encoding} text.", where=where, do=do)


def _check_folder() -> None:
    try:
        folder = os.getcwd()
    except OSError as error:
        what = f"The current folder cannot be used: {error.strerror}."
        raise TrilloraError(what, where="current folder", do="change to another folder") from error
    _check_text(folder, "The path of the current folder", where=folder)


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


def _number(kind: type[int] | type[float], low: float, high: float) -> Callable[[Any], Any]:
    """A parser for a number of an option: finite and within bounds."""
    name = "a whole number" if kind is int else "a number"

    def parse(text: Any) -> int | float:
        try:
            value = kind(text)
            if low <= value <= high:  # never true for NaN
                return value
        except ValueError:
            pass
        shown = str(text) if len(str(text)) <= 30 else f"{str(text)[:30]}…"
        raise typer.BadParameter(f"'{shown}' is not {name} from {low} to {high}.")

    return parse


MOST_TOKENS = 2**20  # of an answer; no model has a longer context
_tokens, _rows = _number(int, 1, MOST_TOKENS), _number(int, 1, 2**31 - 1)
_temperature, _share, _price = _number(float, 0, 100), _number(float, 0, 1), _number(float, 0, 10**6)
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", metavar="N", parser=_tokens, help="Maximum length of an answer, in tokens.")
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature", metavar="X", parser=_temperature, help="Sampling temperature; 0 picks the most likely token."
    ),
]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="P", parser=_share, help="Nucleus sampling threshold (top-p), 0 to 1.")
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", parser=_number(int, 0, 2**31 - 1), help="Random seed for sampling.")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code of the model. Only for code you have read.")
]
OnlyBase = Annotated[bool, typer.Option("--base", help="Use the run's base model without the adapter.")]


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
        float | None,
        typer.Option("--price", metavar="X", parser=_price, help="Price per chip-hour, used to estimate the cost."),
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
        from trillora.report.console import SafeConsole
        from trillora.report.preflight_screen import show

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
            from trillora.report.console import SafeConsole
            from trillora.report.data.screen import show

            if len(reports) > 1:
                print(f"Stage {name}")
            show(report, SafeConsole())
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
    overrides: Overrides = None,
    *,
    prompts: Annotated[
        list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt to answer. May be repeated.")
    ],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    base: OnlyBase = False,
    trust: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON.")] = False,
) -> None:
    """Answer prompts with a trained run or a model."""
    with _progress_on_stderr() as listener:
        from trillora.engine.sampling import Sampling
        from trillora.generation.generator import Generator

        given = _overrides(overrides, trust)
        generator = Generator.open(name, overrides=given, with_adapter=not base, listener=listener)
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
    overrides: Overrides = None,
    *,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    base: OnlyBase = False,
    trust: TrustCode = False,
) -> None:
    """Chat with a trained run or a model."""
    with _progress_on_stderr() as listener:
        from trillora.engine.sampling import Sampling
        from trillora.generation.chat import converse
        from trillora.generation.generator import Generator

        given = _overrides(overrides, trust)
        generator = Generator.open(name, overrides=given, with_adapter=not base, listener=listener)

    def say(text: str) -> None:
        print(text, end="", flush=True)

    def ask() -> str:
        line = input("> ")
        _check_text(line, "This line")
        return line

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused by `ask`
    converse(generator, ask, say, max_tokens=max_tokens, sampling=Sampling(temperature, top_p, seed=seed))


@app.command("eval")
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.")],
    overrides: Overrides = None,
    *,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="FILE", help="Rows to evaluate on (default: those held out of the run)."),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option("--rows", metavar="N", parser=_rows, help="Evaluate N evenly spaced rows (default: all)."),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            metavar="N",
            parser=_tokens,
            help="Maximum length of an answer, in tokens (default: fits the longest expected).",
        ),
    ] = None,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="Evaluate only the adapter, which takes half the time.")
    ] = False,
    trust: TrustCode = False,
    as_json: JsonResult = False,
) -> None:
    """Evaluate a trained run and its base model on held-out rows."""
    with _progress_on_stderr() as listener:
        from trillora.evaluation import evaluate as evaluation

        result = evaluation.evaluate(
            run,
            data,
            overrides=_overrides(overrides, trust),
            max_rows=rows,
            max_tokens=max_tokens,
            with_base=not no_base,
            listener=listener,
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


def _overrides(given: Sequence[str] | None, trust_remote_code: bool) -> list[str]:
    return [*(given or ()), *(["model.trust_remote_code=true"] if trust_remote_code else [])]


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
    from trillora.devices.quiet import quiet_libraries
    from trillora.report.console import SafeConsole, console_listener

    quiet_libraries()
    with console_listener(SafeConsole(stderr=True)) as listener:
        yield listener


def _only_progress(listener: Listener) -> Listener:
    """Drops all events but progress and alarms: the report has their content."""
    from trillora.events import Alarm, Progress

    def listen(event: Event) -> None:
        if isinstance(event, Progress | Alarm):
            listener(event)

    return listen


def _show_evaluation(evaluation: Evaluation, as_json: bool) -> None:
    if as_json:
        _print_json(evaluation.to_dict())
        return
    from trillora.report.console import SafeConsole
    from trillora.report.eval_table import show

    show(evaluation, SafeConsole())


def _print_json(value: Any) -> None:
    print(json.dumps(value, allow_nan=False))


def _print_event(event: Event) -> None:
    from trillora.events import to_json

    print(to_json(masked(event)), file=closed_pipe_safe(sys.stdout), flush=True)


def _print_error(text: str, ctx: Any) -> None:
    # A URL may reach the message in pieces: as a path, "s3://k:pw@b/x" has the name "x" in the folder "s3:/k:pw@b".
    known = [part for word in ctx.find_root().meta["command"] for part in secrets_of_url(word) if len(part) > 3]
    print(visible(mask_message(text, known)), file=closed_pipe_safe(sys.stderr))


def main() -> None:
    """Entry point of the `trillora` script."""
    ignore_after_stop()
    try:
        app(prog_name="trillora", obj=OWN_PROCESS)
    finally:
        flush_output()
