"""The command line: verbs, and how their errors reach a person.

A verb reads its arguments and calls the library; what it needs is imported inside it, so that `--help` is instant.
Exit codes: 0 done, 1 preflight says NO-GO, 2 a mistake a person can mend (told without a traceback), 75 a run was saved
before its end and goes on with the same command, 76 a run diverged, 130 interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import trillora
from trillora.errors import TrilloraError
from trillora.events import Event, Listener, Progress, to_json
from trillora.training.signals import EXIT_STOPPED

EXIT_NO_GO = 1
EXIT_MISTAKE = 2
EXIT_INTERRUPTED = 130


class Verbs(TyperGroup):
    """Every verb's errors end here: as text and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TrilloraError as error:
            _complain(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            _complain("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from None


app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,  # a traceback is ours to fix: plain text travels best in a report
    context_settings={"help_option_names": ["-h", "--help"]},
    help="LoRA fine-tuning of any Hugging Face causal language model on TPU, GPU and CPU.",
)

AsJson = Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"trillora {trillora.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that describes the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options on top, as in train.steps=10.")
    ] = None,
    *,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="RUN", help="Folder for everything the run writes.")],
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Go on with a run although its recipe, model or data has changed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train an adapter by a recipe, or go on with a run that was interrupted. Exit code 75: saved, to be continued."""
    from trillora.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides or ())
    with _reporting(as_json) as listener:
        from trillora.training import trainer

        result = trainer.train(loaded, out, listener=listener, accept_changes=accept_changes)
    if result.stopped is not None:
        raise typer.Exit(EXIT_STOPPED)


@app.command()
def preflight(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that describes the run.")],
    others: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SLICE | KEY=VALUE]…", help="More slices to compare; options, as in train.batch_size=8."
        ),
    ] = None,
    *,
    on: Annotated[
        list[str], typer.Option("--on", metavar="SLICE", help="What to rent: v5e-8, v6e-1, v4-8, colab, kaggle, …")
    ],
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Do not ask the TPU compiler: estimate, in seconds, on any machine.")
    ] = False,
    whole: Annotated[
        bool, typer.Option("--whole", help="Compile to the end, machine code included: minutes instead of seconds.")
    ] = False,
    price: Annotated[
        float | None, typer.Option("--price", metavar="X", help="Of one chip and hour, for the cost of the run.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Ask again although the answer is known.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
) -> None:
    """Ask the TPU compiler whether a run fits and how long it takes, before a TPU is rented. Exit code 1: NO-GO."""
    from rich.console import Console

    from trillora.preflight.verdict import preflight as ask
    from trillora.recipe.load import load_recipe
    from trillora.report.console import console_listener

    slices = [*on, *(word for word in others or () if "=" not in word)]
    loaded = load_recipe(recipe, [word for word in others or () if "=" in word])
    with console_listener(Console(stderr=True, highlight=False)) as listener:
        answers = ask(
            loaded,
            slices,
            estimate=estimate,
            whole=whole,
            price_per_hour=price,
            use_cache=not fresh,
            listener=listener,
        )
    if as_json:
        import json

        print(json.dumps(answers[0] if len(answers) == 1 else answers, allow_nan=False))
    else:
        from trillora.report.preflight_screen import show

        show(answers, Console(highlight=False))
    if all(answer["verdict"] == "NO-GO" for answer in answers):
        raise typer.Exit(EXIT_NO_GO)


@app.command()
def inspect(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="The YAML file that describes the run.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Options on top, as in data.on_bad_row=skip.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page as well.")
    ] = None,
    stage: Annotated[
        str | None, typer.Option("--stage", metavar="NAME", help="Only this stage of a recipe that has several.")
    ] = None,
) -> None:
    """Show what a recipe's data would train: rows, tokens, lengths, an example. Exit code 2 if it would be refused."""
    from rich.console import Console

    from trillora.recipe.load import load_recipe
    from trillora.report.console import console_listener

    loaded = load_recipe(recipe, overrides or ())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # data has letters a terminal may not
    # Progress goes to stderr: stdout is the report's.
    with console_listener(Console(stderr=True, highlight=False)) as listener:
        from trillora.data.summary import inspect as summarise
        from trillora.recipe.schema import stages_of

        stages = [s for s in stages_of(loaded) if stage in (None, s.name)]
        if not stages:
            names = " ".join(s.name for s in stages_of(loaded))
            raise TrilloraError(f"No stage is called {stage}.", where="--stage", do=f"one of: {names}")
        reports = {s.name: summarise(s.recipe, _only_progress(listener)) for s in stages}
    for name, report in reports.items():
        if as_json:
            import json

            print(json.dumps(report.to_dict(), allow_nan=False))
        else:
            from trillora.report.data.screen import show

            if len(reports) > 1:
                print(f"Stage {name}")
            show(report, Console(highlight=False))
    if html is not None:
        from trillora.report.data.page import write_page

        for name, report in reports.items():
            file = html if len(reports) == 1 else html.with_stem(f"{html.stem}-{name}")
            write_page(report, file)
            print(f"Page written to {file}", file=sys.stderr)
    for report in reports.values():
        if (refusal := report.verdict.refusal()) is not None:
            raise refusal


RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="A run's folder; or a model: folder, id, smollm2.")
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", metavar="X", help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", help="Draw from the likeliest tokens of this share.")]
Seed = Annotated[int, typer.Option("--seed", metavar="S", help="Equal seeds draw equal answers.")]
OnlyBase = Annotated[bool, typer.Option("--base", help="Ask the run's base model, without the adapter.")]


@app.command()
def generate(
    name: RunOrModel,
    *,
    prompts: Annotated[list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="A question; may be repeated.")],
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    base: OnlyBase = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON.")] = False,
) -> None:
    """Answer prompts with a trained run or any model."""
    import json

    with _progress_on_stderr() as listener:
        from trillora.engine.sampling import Sampling
        from trillora.generation.generator import Generator

        generator = Generator.open(name, with_adapter=not base, listener=listener)
        sampling = Sampling(temperature, top_p, seed=seed)
        answers = generator.generate(prompts, max_tokens=max_tokens, sampling=sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        if as_json:
            counts = {"num_prompt_tokens": answer.num_prompt_tokens, "num_tokens": len(answer.tokens)}
            print(json.dumps({"prompt": prompt, "text": answer.text, **counts, "stopped": answer.stopped}))
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
    """Talk with a trained run or any chat model."""
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
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder.")],
    *,
    data: Annotated[
        str | None, typer.Option("--data", metavar="FILE", help="Rows to test on; else those the run kept for a test.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", help="So many rows, spread evenly; all when not given.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens; else the longest expected decides."),
    ] = None,
    no_base: Annotated[bool, typer.Option("--no-base", help="Test the adapter alone, in half the time.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")] = False,
) -> None:
    """Test a trained run on rows it has not seen, beside its base model."""
    import json

    with _progress_on_stderr() as listener:
        from trillora.evaluation import evaluate as tests

        result = tests.evaluate(
            run, data, max_rows=rows, max_tokens=max_tokens, with_base=not no_base, listener=listener
        )
    if as_json:
        print(json.dumps(result.to_dict(), allow_nan=False))
        return
    from rich.console import Console

    from trillora.report.eval_table import show

    show(result, Console(highlight=False))


@app.command()
def quickstart(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="RUN", help="Folder for everything the run writes.")
    ] = Path("runs/quickstart"),
    as_json: AsJson = False,
) -> None:
    """Train a real model on real data, offline, in minutes on a laptop."""
    with _reporting(as_json) as listener:
        from trillora.quickstart import run as lesson

        result, evaluation = lesson.run(out, listener)
    if evaluation is None:
        raise typer.Exit(EXIT_STOPPED)
    if as_json:
        import json

        print(json.dumps(evaluation.to_dict()))
    else:
        from rich.console import Console

        from trillora.report.eval_table import show

        show(evaluation, Console(highlight=False))
        print(lesson.next_steps(result.run))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as one JSON list.")] = False,
) -> None:
    """Say what this machine is and whether runs will work here. Exit code 2 if something is broken."""
    import dataclasses
    import json

    from trillora.doctor import examine, this_machine

    if not as_json:
        print("Looking at this machine; starting jax may take a minute on a TPU.", file=sys.stderr)
    findings = examine(this_machine())
    if as_json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    else:
        from trillora.report.console import show_findings

        show_findings(findings)
    if any(finding.state == "broken" for finding in findings):
        raise typer.Exit(EXIT_MISTAKE)


@app.command()
def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, finished or not.")]) -> None:
    """Write a run's report.html anew, and say where it is."""
    from trillora.report.run.write import write_report

    print(write_report(run))


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    import json

    from trillora.recipe.load import recipe_schema

    print(json.dumps(recipe_schema(), indent=2, ensure_ascii=False))


@contextmanager
def _reporting(as_json: bool) -> Iterator[Listener]:
    if as_json:
        yield _print_json
        return
    from trillora.report.console import console_listener

    with console_listener() as listener:
        yield listener


@contextmanager
def _progress_on_stderr() -> Iterator[Listener]:
    """For verbs whose answer is stdout."""
    from rich.console import Console

    from trillora.report.console import console_listener

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model has letters a terminal may not
    with console_listener(Console(stderr=True, highlight=False)) as listener:
        yield listener


def _complain(text: str) -> None:
    from trillora.report.console import closed_pipe_safe

    print(text, file=closed_pipe_safe(sys.stderr))


def _only_progress(listener: Listener) -> Listener:
    """What is no progress stands in the report anyway."""

    def listen(event: Event) -> None:
        if isinstance(event, Progress):
            listener(event)

    return listen


def _print_json(event: Event) -> None:
    from trillora.report.console import closed_pipe_safe

    print(to_json(event), file=closed_pipe_safe(sys.stdout), flush=True)


def main() -> None:
    """Entry point of the `trillora` script."""
    try:
        app(prog_name="trillora")
    finally:
        from trillora.report.console import let_go_of_closed_output

        let_go_of_closed_output()
