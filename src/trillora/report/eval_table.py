"""Shows an evaluation in a terminal: a few answers, then the metrics of base model and adapter next to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trillora.evaluation.result import (
    GUESSED,
    LABELS,
    NOT_SHARES,
    Evaluation,
    Example,
    Forgetting,
    Interval,
    Needle,
    shown_metrics,
)
from trillora.evaluation.scores import Scores, is_right
from trillora.report.numbers import format_count
from trillora.safe_text import visible

NUM_SHOWN = 3  # examples
NUM_FIELDS = 20
MAX_CHARACTERS = 400  # of a prompt or an answer
BETTER, WORSE, NO_BETTER_THAN_GUESS = "bold green", "bold red", "bold yellow"
BEYOND_CHANCE = "* beyond chance: the 95 % interval does not contain 0 (paired bootstrap over the rows)"


def show(evaluation: Evaluation, console: Console) -> None:
    """Prints the examples, then the metrics: they stay in view above the prompt. The gate comes last."""
    lines = box.ROUNDED if console.encoding.lower().startswith("utf") else box.ASCII
    parts = evaluation.files or (evaluation,)
    for example in [example for part in parts for example in part.examples[: -(-NUM_SHOWN // len(parts))]][:NUM_SHOWN]:
        console.print(Text.assemble(("Question  ", "bold"), _short(example.prompt)))
        console.print(_answers(example, lines))
    console.print(_Metrics(evaluation, lines).table)
    if evaluation.needle is not None:
        console.print(_needle(evaluation.needle, lines))
    if evaluation.gate:
        console.print(_gate(evaluation, lines))


def _needle(found: Needle, lines: box.Box) -> Table:
    """A row for each length, a column for each depth."""
    sides = "adapter" if found.base is None else "base, adapter"
    title = f"facts found in long texts ({sides}), {found.num_facts} at each length and depth"
    table = Table(box=lines, title=Text(title, "dim"), title_justify="left")
    table.add_column("tokens", justify="right", header_style="bold")
    for depth in found.depths:
        table.add_column(f"depth {depth:.0%}", justify="right", header_style="dim")
    for row, length in enumerate(found.lengths):
        cells = []
        for column, after in enumerate(found.adapter[row]):
            before = None if found.base is None else found.base[row][column]
            cell = Text("" if before is None else f"{before:.0%}  ", "dim")
            cells.append(cell.append(f"{after:.0%}", _style(before, after, None, higher_is_better=True)))
        table.add_row(f"{length:,}", *cells)
    return table


def _answers(example: Example, lines: box.Box) -> Table:
    table = Table(box=lines, expand=True)
    known = {name: text for name, text in (("base", example.base), ("adapter", example.adapter)) if text is not None}
    of_pair = {name: found for name, found in example.scores.items() if "rejected" in found}
    heads = ["chosen", *(f"{name} prefers" for name in known)] if of_pair else ["expected", *known]
    for head in heads:
        table.add_column(head, ratio=1, overflow="fold", header_style="dim")
    cells = [Text(_short(text), "green" if is_right(example.expected, text) else "") for text in known.values()]
    table.add_row(Text(_short(example.expected)), *cells)
    if of_pair:
        table.add_row(Text("log-probability", "dim"), *(Text(_log_probs(of_pair[name]), "dim") for name in known))
    return table


def _log_probs(found: Mapping[str, float]) -> str:
    return f"chosen {found['chosen']:,.1f}, rejected {found['rejected']:,.1f}"


class _Metrics:
    """The table of all metrics: a group of rows for each file, their means, and the forgetting meter."""

    def __init__(self, evaluation: Evaluation, lines: box.Box) -> None:
        parts = evaluation.files or (evaluation,)
        self._with_base = evaluation.base is not None
        self._with_change = any(part.intervals for part in parts) or evaluation.forgetting is not None
        self._with_guess = any(part.majority or part.chance is not None for part in parts)
        title = "" if evaluation.files else _name(evaluation)
        self.table = Table(box=lines, title=Text(title, "dim"), title_justify="left")
        self._add_columns()
        for part in parts:
            if evaluation.files:
                self._head(f"{visible(part.label)}, {format_count(part.num_rows, 'row', 'rows')}")
            self._scores(part, shown_metrics(part.kind))
        if shared := shared_metrics(evaluation):
            self._head("mean of the files")
            self._scores(evaluation, shared)
        if evaluation.forgetting is not None:
            self._forgetting(evaluation.forgetting)
        hidden = [len(part.adapter.fields) - NUM_FIELDS for part in parts if len(part.adapter.fields) > NUM_FIELDS]
        notes = [f"{sum(hidden):,} more fields are in eval.json"] if hidden else []
        notes += [BEYOND_CHANCE] if self._with_change else []
        self.table.caption = "\n".join(notes) or None
        self.table.caption_justify = "left"

    def _add_columns(self) -> None:
        self.table.add_column("metric", header_style="bold")
        if self._with_base:
            self.table.add_column("base", justify="right")
        self.table.add_column("adapter", justify="right", header_style="bold")
        if self._with_change:
            self.table.add_column("change, 95 %", header_style="dim", no_wrap=True)
        if self._with_guess:
            self.table.add_column("majority guess", justify="right", header_style="dim", max_width=8)

    def _head(self, text: str) -> None:
        self.table.add_section()
        self.table.add_row(Text(text, "bold"))

    def _scores(self, part: Evaluation, names: Sequence[str]) -> None:
        for name in names:
            guess = part.chance if name in GUESSED else None
            before, after = _of(part.base, name), _of(part.adapter, name)
            self._row(LABELS[name], before, after, part.intervals.get(name), guess, share=name not in NOT_SHARES)
        for field in list(part.adapter.fields)[:NUM_FIELDS]:
            before = part.base.fields.get(field) if part.base is not None else None
            change, guess = part.intervals.get(f"fields.{field}"), part.majority.get(field)
            self._row(f"  {visible(field)} right", before, part.adapter.fields[field], change, guess)

    def _forgetting(self, meter: Forgetting) -> None:
        self._head(f"{meter.num_questions} general questions")
        self._row("accuracy", meter.base_accuracy, meter.adapter_accuracy, meter.interval)
        self._row("forgetting", None, meter.forgetting)
        self._row("KL from the base", None, meter.kl, share=False)

    def _row(
        self,
        name: str,
        before: float | None,
        after: float | None,
        change: Interval | None = None,
        guess: float | None = None,
        *,
        share: bool = True,
    ) -> None:
        if after is None:
            return
        style = _style(before, after, change, higher_is_better=share)
        if guess is not None and after <= guess:
            style = NO_BETTER_THAN_GUESS
        cells = [Text(_figure(before, share), "dim")] if self._with_base else []
        cells.append(Text(_figure(after, share), style))
        if self._with_change:
            cells.append(Text(_change(change, share), "dim"))
        if self._with_guess:
            cells.append(Text(_figure(guess, share), "dim"))
        self.table.add_row(Text(name), *cells)


def show_harness(results: Mapping[str, Mapping[str, Mapping[str, float | None]]], console: Console) -> None:
    """Prints the scores of harness tasks: a row for each metric of each task."""
    lines = box.ROUNDED if console.encoding.lower().startswith("utf") else box.ASCII
    sides = [
        side for side in ("base", "adapter") if any(side in row for task in results.values() for row in task.values())
    ]
    table = Table(box=lines, title=Text("lm-evaluation-harness", "dim"), title_justify="left")
    for name in ("task", "metric", *sides, "standard error"):
        table.add_column(name, justify="left" if name in ("task", "metric") else "right")
    for task, metrics in results.items():
        for number, (metric, row) in enumerate(metrics.items()):
            figures = (row.get(name) for name in (*sides, "stderr"))
            cells = ("" if value is None else f"{value:.4f}" for value in figures)
            table.add_row(Text("" if number else visible(task)), Text(visible(metric)), *cells)
        table.add_section()
    console.print(table)


def _gate(evaluation: Evaluation, lines: box.Box) -> Table:
    passed = evaluation.passed
    title = Text("gate passed" if passed else "gate not passed", BETTER if passed else WORSE)
    table = Table(box=lines, title=title, title_justify="left")
    for name in ("condition", "measured", ""):
        table.add_column(name)
    for condition in evaluation.gate:
        value = "not measured" if condition.value is None else f"{condition.value:.4g}"
        verdict = Text("met", BETTER) if condition.met else Text("not met", WORSE)
        table.add_row(Text(visible(condition.condition)), value, verdict)
    return table


def shared_metrics(evaluation: Evaluation) -> list[str]:
    """The metrics that several of the files show: only their means say something new."""
    shown = [(shown_metrics(file.kind), file.adapter) for file in evaluation.files]
    return [name for name in LABELS if sum(name in names and _of(of, name) is not None for names, of in shown) > 1]


def _name(part: Evaluation) -> str:
    return f"{format_count(part.num_rows, 'row', 'rows')} of {visible(part.data)}"


def _of(scores: Scores | None, key: str) -> float | None:
    return None if scores is None else getattr(scores, key)


def _figure(value: float | None, share: bool) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if share else f"{value:,.4f}" if value < 100 else f"{value:,.0f}"


def _change(change: Interval | None, share: bool) -> str:
    """The interval; of shares in percentage points."""
    if change is None:
        return ""
    scale, digits = (100, 1) if share else (1, 3 if abs(change.difference) < 10 else 0)
    low, high = (f"{scale * value:+,.{digits}f}" for value in (change.low, change.high))
    return f"{low} to {high}" + (" *" if change.beyond_chance else "")


def _style(before: float | None, after: float, change: Interval | None, *, higher_is_better: bool) -> str:
    """Colored if the adapter is better or worse than the base, and not by chance if that is known."""
    if before is None or before == after or (change is not None and not change.beyond_chance):
        return "bold"
    return BETTER if (after > before) == higher_is_better else WORSE


def _short(text: str) -> str:
    text = visible(text.strip())
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]} … ({len(text):,} characters)"
