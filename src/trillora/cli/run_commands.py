"""The commands that use a run or a model: generate, chat, eval; and report."""

from __future__ import annotations

import io
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from trillora.cli.errors import check_text
from trillora.cli.options import (
    Gate,
    HarnessTasks,
    JsonResult,
    MaxTokens,
    NeedleLengths,
    NumRows,
    OnlyBase,
    OtherAdapter,
    Overrides,
    QuantizeBase,
    RunOrModel,
    Seed,
    TaskFolder,
    Temperature,
    TestData,
    TopP,
    TrustCode,
    WithForgetting,
    parse_tokens,
)
from trillora.cli.output import print_json, progress_on_stderr, show_evaluation
from trillora.errors import TrilloraError

EXIT_GATE = 3


def generate(
    name: RunOrModel,
    overrides: Overrides = None,
    *,
    prompts: Annotated[
        list[str], typer.Option("--prompt", "-p", metavar="TEXT", help="Prompt to answer. May be repeated.")
    ],
    system: Annotated[
        str | None,
        typer.Option(
            "--system",
            metavar="TEXT",
            help='System message (default: the one that all rows of the training had, if they had the same; "": none).',
        ),
    ] = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    base: OnlyBase = False,
    adapter: OtherAdapter = None,
    quantize: QuantizeBase = None,
    trust: TrustCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print each answer as one line of JSON.")] = False,
) -> None:
    """Answer prompts with a trained run or a model."""
    with progress_on_stderr(as_json=as_json) as listener:
        from trillora.early.runs import check_source

        given, other = _overrides(overrides, trust), _adapter(adapter, base)
        check_source(name, given, with_adapter=not base, adapter=other)
        from trillora.engine.sampling import Sampling
        from trillora.events import Note
        from trillora.generation.generator import Generator
        from trillora.generation.system_message import trained_with, with_system

        generator = Generator.open(
            name, overrides=given, with_adapter=not base, adapter=other, quantize=quantize, listener=listener
        )
        if system is None and generator.system:
            listener(Note(f'{trained_with(generator.system)} It is used here too; --system "" leaves it out.'))
        given_prompts = [with_system(prompt, generator.system if system is None else system) for prompt in prompts]
        sampling = Sampling(temperature, top_p, seed=seed)
        answers = generator.generate(given_prompts, max_tokens=max_tokens, sampling=sampling)
    for prompt, answer in zip(prompts, answers, strict=True):
        if as_json:
            counts = {"num_prompt_tokens": answer.num_prompt_tokens, "num_tokens": len(answer.tokens)}
            print_json({"prompt": prompt, "text": answer.text, **counts, "stopped": answer.stopped})
        else:
            print(f"> {prompt}\n{answer.text}\n" if len(prompts) > 1 else answer.text)


def chat(
    name: RunOrModel,
    overrides: Overrides = None,
    *,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 0.95,
    seed: Seed = 0,
    base: OnlyBase = False,
    adapter: OtherAdapter = None,
    quantize: QuantizeBase = None,
    trust: TrustCode = False,
) -> None:
    """Chat with a trained run or a model.

    /help lists the commands of the chat: /compare, /system, /save and others.
    """
    with progress_on_stderr() as listener:
        from trillora.early.runs import check_source

        given, other = _overrides(overrides, trust), _adapter(adapter, base)
        check_source(name, given, with_adapter=not base, adapter=other)
        from trillora.engine.sampling import Sampling
        from trillora.generation.chat import converse
        from trillora.generation.generator import Generator

        generator = Generator.open(
            name, overrides=given, with_adapter=not base, adapter=other, quantize=quantize, listener=listener
        )

    def say(text: str) -> None:
        print(text, end="", flush=True)

    def ask() -> str:
        line = input("> ")
        check_text(line, "This line")
        return line

    def width() -> int | None:
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # refused by `ask`
        if sys.stdin.isatty() and sys.stdout.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401  (arrow keys and earlier lines in `input`)
    sampling = Sampling(temperature, top_p, seed=seed)
    converse(generator, ask, say, max_tokens=max_tokens, sampling=sampling, width=width)


MaxAnswer = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        parser=parse_tokens,
        help="Maximum length of an answer, in tokens (default: fits the longest expected).",
    ),
]


def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Folder of a run.")],
    overrides: Overrides = None,
    *,
    data: TestData = None,
    rows: NumRows = None,
    max_tokens: MaxAnswer = None,
    no_base: Annotated[
        bool, typer.Option("--no-base", help="Evaluate only the adapter, which takes half the time.")
    ] = False,
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="NAME", help="Stage or phase whose rows are used (default: the last stage)."),
    ] = None,
    forgetting: WithForgetting = False,
    needle: NeedleLengths = None,
    gate: Gate = None,
    harness: HarnessTasks = None,
    include_path: TaskFolder = None,
    adapter: OtherAdapter = None,
    trust: TrustCode = False,
    as_json: JsonResult = False,
) -> None:
    """Evaluate a trained run and its base model on held-out rows."""
    if harness is None and include_path is not None:
        raise TrilloraError("--include-path is for --harness.", where="--include-path", do="name tasks with --harness")
    if harness is not None:
        if data or gate or forgetting or needle or stage:
            what = "--harness runs tasks with data of their own."
            do = "leave out --data, --gate, --forgetting, --needle and --stage"
            raise TrilloraError(what, where="--harness", do=do)
        _check_evaluation(run, _overrides(overrides, trust), (), None, adapter)
        _harness(run, harness, include_path, rows, not no_base, adapter, _overrides(overrides, trust), as_json)
        return
    with progress_on_stderr(as_json=as_json) as listener:
        _check_evaluation(run, _overrides(overrides, trust), data or (), stage, adapter)
        from trillora.evaluation import evaluate as evaluation

        result = evaluation.evaluate(
            run,
            data or None,
            stage=stage,
            adapter=adapter,
            overrides=_overrides(overrides, trust),
            max_rows=rows,
            max_tokens=max_tokens,
            with_base=not no_base,
            forgetting=forgetting,
            needle=needle,
            gate=gate,
            listener=listener,
        )
        from trillora.adapters.card import refresh_card

        refresh_card(Path(run))
    show_evaluation(result, as_json)
    if not result.passed:
        raise typer.Exit(EXIT_GATE)


def _check_evaluation(
    run: str, overrides: Sequence[str], data: Sequence[str], stage: str | None, adapter: str | None
) -> None:
    """What can be wrong before anything is loaded."""
    from trillora.early.runs import check_run
    from trillora.early.training import check_files

    check_run(run, overrides, adapter=adapter, stage=stage)
    for file in data:
        check_files(file)


def _harness(
    run: str,
    tasks: str,
    include_path: Path | None,
    rows: int | None,
    with_base: bool,
    adapter: str | None,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    with progress_on_stderr(as_json=as_json) as listener:
        from trillora.evaluation.harness import run_tasks

        result = run_tasks(
            run,
            tasks.split(","),
            include_path=include_path,
            max_rows=rows,
            with_base=with_base,
            adapter=adapter,
            overrides=overrides,
            listener=listener,
        )
    if as_json:
        print_json(result)
        return
    from trillora.report.eval_table import show_harness
    from trillora.report.safe_console import SafeConsole

    show_harness(result, SafeConsole())


def report(run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.")]) -> None:
    """Write a run's report.html again and print its path."""
    from trillora.report.run.write import write_report

    print(write_report(run))


def _overrides(given: Sequence[str] | None, trust_remote_code: bool) -> list[str]:
    return [*(given or ()), *(["model.trust_remote_code=true"] if trust_remote_code else [])]


def _adapter(name: str | None, only_base: bool) -> str | None:
    if name is not None and only_base:
        what = "--base and --adapter contradict each other."
        raise TrilloraError(what, where="--adapter", do="leave out one of them")
    return name
