"""Arguments and options that several commands share, and their parsers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer

RecipeFile = Annotated[Path, typer.Argument(metavar="RECIPE", help="YAML file that describes the run.")]
RecipeOrData = Annotated[
    Path, typer.Argument(metavar="RECIPE", help="YAML file that describes the run; or a data file, with --model.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Options that replace the recipe's, e.g. train.steps=10."),
]
Tiny = Annotated[
    bool,
    typer.Option("--tiny", help="Use the embedded model and small sizes, to try the recipe on a CPU in minutes."),
]
RunOrModel = Annotated[
    str, typer.Argument(metavar="RUN|MODEL", help="Folder of a run; or a model: folder, hub id or smollm2.")
]
RunFolder = Annotated[Path, typer.Option("--out", "-o", metavar="RUN", help="Output folder of the run.")]
JsonEvents = Annotated[bool, typer.Option("--json", help="Print each event as one line of JSON.")]
JsonResult = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def number_parser(kind: type[int] | type[float], low: float, high: float) -> Callable[[Any], Any]:
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
parse_tokens, parse_rows = number_parser(int, 1, MOST_TOKENS), number_parser(int, 1, 2**31 - 1)
parse_temperature, parse_share, parse_price = (
    number_parser(float, 0, 100),
    number_parser(float, 0, 1),
    number_parser(float, 0, 10**6),
)
MaxTokens = Annotated[
    int, typer.Option("--max-tokens", metavar="N", parser=parse_tokens, help="Maximum length of an answer, in tokens.")
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        metavar="X",
        parser=parse_temperature,
        help="Sampling temperature; 0 picks the most likely token.",
    ),
]
TopP = Annotated[
    float, typer.Option("--top-p", metavar="P", parser=parse_share, help="Nucleus sampling threshold (top-p), 0 to 1.")
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", parser=number_parser(int, 0, 2**31 - 1), help="Random seed for sampling.")
]
TrustCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code of the model. Only for code you have read.")
]
OtherAdapter = Annotated[
    str | None,
    typer.Option("--adapter", metavar="FOLDER", help="Use this adapter: its folder, its run, or its name in this run."),
]
OnlyBase = Annotated[bool, typer.Option("--base", help="Use the run's base model without the adapter.")]


def parse_format(text: str) -> str:
    if text not in FORMATS:
        raise typer.BadParameter(f"'{text[:30]}' is none of {', '.join(FORMATS)}.")
    return text


Format = Literal["none", "int8", "int4", "nf4", "fp8"]
FORMATS: tuple[str, ...] = get_args(Format)
QuantizeBase = Annotated[
    Format | None,
    typer.Option(
        "--quantize",
        metavar="FORMAT",
        parser=parse_format,
        help=f"Number format of the base: {', '.join(FORMATS)} (default: the run's).",
    ),
]
# Of `trillora eval`.
TestData = Annotated[
    list[str] | None,
    typer.Option(
        "--data", metavar="FILE", help="Rows to evaluate on (default: those held out of the run). May be repeated."
    ),
]
NumRows = Annotated[
    int | None,
    typer.Option("--rows", metavar="N", parser=parse_rows, help="Evaluate N evenly spaced rows (default: all)."),
]
WithForgetting = Annotated[
    bool, typer.Option("--forgetting", help="Also ask general questions, to see what the adapter has forgotten.")
]
NeedleLengths = Annotated[
    str | None,
    typer.Option(
        "--needle", metavar="LENGTHS", help="Also hide facts in texts of these lengths in tokens, such as 1024,4096."
    ),
]
Gate = Annotated[
    str | None,
    typer.Option("--gate", metavar="CONDITIONS", help='Exit with code 3 unless all hold: "exact_match>=0.6, ...".'),
]
HarnessTasks = Annotated[
    str | None,
    typer.Option("--harness", metavar="TASK,...", help="Run tasks of lm-evaluation-harness instead."),
]
TaskFolder = Annotated[
    Path | None,
    typer.Option("--include-path", metavar="FOLDER", help="Folder with your own harness tasks; they need no network."),
]
