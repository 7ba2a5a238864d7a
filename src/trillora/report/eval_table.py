"""Shows an evaluation in a terminal: a few answers, then the metrics of base model and adapter next to each other."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trillora.evaluation.evaluate import Evaluation, Example
from trillora.evaluation.scores import Scores, is_right
from trillora.report.numbers import format_count
from trillora.safe_text import visible

NUM_SHOWN = 3  # examples
NUM_FIELDS = 20
MAX_CHARACTERS = 400  # of a prompt or an answer
BETTER, WORSE, NO_BETTER_THAN_GUESS = "bold green", "bold red", "bold yellow"


def show(evaluation: Evaluation, console: Console) -> None:
    """Prints the examples, then the metrics: they stay in view above the prompt."""
    lines = box.ROUNDED if console.encoding.lower().startswith("utf") else box.ASCII
    for number, example in enumerate(evaluation.examples[:NUM_SHOWN], 1):
        console.print(Text.assemble((f"Question {number}  ", "bold"), _short(example.prompt)))
        console.print(_answers(example, lines))
    console.print(_metrics(evaluation, lines))


def _answers(example: Example, lines: box.Box) -> Table:
    table = Table(box=lines, expand=True)
    answers = {"expected": example.expected, "base": example.base, "adapter": example.adapter}
    known = {name: text for name, text in answers.items() if text is not None}
    for name in known:
        table.add_column(name, ratio=1, overflow="fold", header_style="dim")
    table.add_row(
        *(
            Text(_short(text), "green" if name != "expected" and is_right(example.expected, text) else "")
            for name, text in known.items()
        )
    )
    return table


def _metrics(evaluation: Evaluation, lines: box.Box) -> Table:
    base, adapter, guess = evaluation.base, evaluation.adapter, evaluation.majority
    rows = format_count(evaluation.num_rows, "row", "rows")
    title = Text.assemble((f"{rows} of ", "dim"), (visible(evaluation.data), "dim"))
    table = Table(box=lines, title=title, title_justify="left")
    table.add_column("metric", header_style="bold")
    if base is not None:
        table.add_column("base", justify="right")
    table.add_column("adapter", justify="right", header_style="bold")
    if guess:
        table.add_column("majority guess", justify="right", header_style="dim")

    def add(name: str, before: float | None, after: float | None, *, share: bool, guessed: float | None = None) -> None:
        if after is None:
            return
        cells = [Text(_figure(before, share), "dim")] if base is not None else []
        style = _style(before, after, higher_is_better=share)
        if guessed is not None and after <= guessed:
            style = NO_BETTER_THAN_GUESS
        cells.append(Text(_figure(after, share), style))
        if guess:
            cells.append(Text(_figure(guessed, share), "dim"))
        table.add_row(Text(name), *cells)

    for key in ("loss", "perplexity"):
        add(key, _of(base, key), _of(adapter, key), share=False)
    for name, key in (
        ("token accuracy", "accuracy"),
        ("exact match", "exact_match"),
        ("valid JSON", "valid_json"),
        ("right fields", "right_fields"),
    ):
        add(name, _of(base, key), _of(adapter, key), share=True)
    for field in list(adapter.fields)[:NUM_FIELDS]:
        before = base.fields.get(field) if base is not None else None
        add(f"  {visible(field)} right", before, adapter.fields[field], share=True, guessed=guess.get(field))
    num_hidden = len(adapter.fields) - NUM_FIELDS
    if num_hidden > 0:
        table.caption = f"{num_hidden:,} more fields are in eval.json"
    return table


def _of(scores: Scores | None, key: str) -> float | None:
    return None if scores is None else getattr(scores, key)


def _figure(value: float | None, share: bool) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if share else f"{value:,.4f}" if value < 100 else f"{value:,.0f}"


def _style(before: float | None, after: float, *, higher_is_better: bool) -> str:
    if before is None or before == after:
        return "bold"
    return BETTER if (after > before) == higher_is_better else WORSE


def _short(text: str) -> str:
    text = visible(text.strip())
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} … ({len(text):,} characters)"
