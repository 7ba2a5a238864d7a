"""The scores of `trillora eval` in report.html: base and adapter, with the change and its interval.

`eval.json` may be damaged: what is missing is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trillora.evaluation.result import GUESSED, LABELS, NOT_SHARES, shown_metrics
from trillora.report.numbers import format_number, format_percent
from trillora.report.run.answers import MAX_SAMPLES, Conversation, answer, conversation
from trillora.report.run.parse import count, finite, mapping, mappings, number, words
from trillora.report.run.read import RunRecord

MAX_FIELDS = 60
MAX_FILES = 100
MAX_CONDITIONS = 100
LONGER_LABELS = {**LABELS, "right_fields": "JSON with the expected fields", "choice_accuracy": "multiple choice"}


@dataclass(frozen=True)
class ShownValue:
    text: str
    kind: str  # adapted, guess, or nothing: CSS class
    share: float | None  # the length of a meter below it


@dataclass(frozen=True)
class Change:
    """The adapter's score minus the base's. `may_be_chance`: the interval contains 0."""

    difference: str
    interval: str
    may_be_chance: bool


@dataclass(frozen=True)
class Row:
    label: str
    values: tuple[ShownValue, ShownValue, ShownValue]  # base, adapter, guessing
    change: Change | None


@dataclass(frozen=True)
class ScoreTable:
    names: tuple[str, ...]  # of the columns
    metrics: list[Row]
    fields: list[Row]


@dataclass(frozen=True)
class ShownScores:
    """The test set, or one of its files."""

    title: str
    table: ScoreTable
    examples: list[Conversation]


@dataclass(frozen=True)
class ShownForgetting:
    lost: str  # share of the general questions; empty if none
    is_chance: bool
    num_questions: int
    base: str
    adapter: str
    kl: str


@dataclass(frozen=True)
class ShownCondition:
    condition: str
    is_met: bool
    value: str


@dataclass(frozen=True)
class EvalScores:
    whole: ShownScores | None
    files: list[ShownScores]  # if there are several
    forgetting: ShownForgetting | None
    gate: list[ShownCondition]


def eval_scores(run: RunRecord) -> EvalScores | None:
    found = run.evaluated
    if not mapping(found.get("base")) and not mapping(found.get("adapter")):
        return None
    files = mappings(found.get("files"))[:MAX_FILES]
    kind = words(found.get("kind")) or "json"
    whole = None
    if not files:
        name = words(found.get("data")) or "test set"
        whole = ShownScores(f"{name}{_rows(found)}", _table(found, shown_metrics(kind)), _examples(found))
    elif shared := _shared(files):
        whole = ShownScores(f"Mean of the files{_rows(found)}", _table(found, shared), [])
    return EvalScores(
        whole, [_file(file) for file in files], _forgetting(mapping(found.get("forgetting"))), _gate(found)
    )


def _shared(files: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics that several files show: only their means say something new."""
    shown = [(shown_metrics(words(file.get("kind"))), mapping(file.get("adapter"))) for file in files]
    return [
        name for name in LABELS if sum(name in names and number(of.get(name)) is not None for names, of in shown) > 1
    ]


def _file(found: dict[str, Any]) -> ShownScores:
    """One of several files; its first score is in the title."""
    of_base, of_adapter = mapping(found.get("base")), mapping(found.get("adapter"))
    every = shown_metrics(words(found.get("kind")))
    metrics = every[3:] or ("loss",)
    name = next((name for name in metrics if finite(of_adapter.get(name)) is not None), None)
    headline = ""
    if name is not None:
        as_text = format_number if name in NOT_SHARES else format_percent
        before, after = finite(of_base.get(name)), finite(of_adapter.get(name))
        headline = f": {LONGER_LABELS[name]} {as_text(after)}" + (
            f", base {as_text(before)}" if before is not None else ""
        )
    title = words(found.get("label")) or words(found.get("data")) or "file"
    return ShownScores(f"{title}{_rows(found)}{headline}", _table(found, every), _examples(found))


def _rows(found: dict[str, Any]) -> str:
    rows = count(found.get("num_rows"))
    return f", {rows:,} rows" if rows is not None else ""


def _table(found: dict[str, Any], metrics: Sequence[str]) -> ScoreTable:
    base, adapter, guess, changes = (mapping(found.get(name)) for name in ("base", "adapter", "majority", "intervals"))
    chance = finite(found.get("chance"))
    names = ("base", "adapter", "change, 95 %" if changes else "", "majority guess" if guess or chance else "")
    rows = []
    for name in metrics:
        change, guessed = mapping(changes.get(name)), chance if name in GUESSED else None
        values = [base.get(name), adapter.get(name), guessed]
        rows.append(_row(LONGER_LABELS[name], values, change, share=name not in NOT_SHARES))
    of_base, of_adapter = (mapping(part.get("fields")) for part in (base, adapter))
    fields = [
        _row(name, [part.get(name) for part in (of_base, of_adapter, guess)], mapping(changes.get(f"fields.{name}")))
        for name in list(dict.fromkeys([*of_adapter, *of_base, *guess]))[:MAX_FIELDS]
    ]
    return ScoreTable(names, [row for row in rows if row], [row for row in fields if row])


def _row(label: str, values: Sequence[Any], change: dict[str, Any], *, share: bool = True) -> Row | None:
    """Values of base and adapter, and of guessing."""
    known = [finite(value) if share else number(value) for value in values]
    if all(value is None for value in known):
        return None
    base, adapter, guess = (
        ShownValue(
            "" if value is None else (format_percent if share else format_number)(value), kind, value if share else None
        )
        for kind, value in zip(("", "adapted", "guess"), known, strict=True)
    )
    return Row(label, (base, adapter, guess), _change(change, share))


def _change(change: dict[str, Any], share: bool) -> Change | None:
    values = [finite(change.get(name)) for name in ("difference", "low", "high")]
    if any(value is None for value in values):
        return None
    difference, low, high = (_signed(value or 0.0, share) for value in values)
    return Change(difference, f"{low} to {high}", change.get("beyond_chance") is not True)


def _signed(value: float, share: bool) -> str:
    """Of shares in percentage points."""
    if share:
        return f"{100 * value:+.1f}".replace("-", "\u2212")
    return ("\u2212" if value < 0 else "+") + format_number(abs(value))


def _forgetting(meter: dict[str, Any]) -> ShownForgetting | None:
    base, adapter, lost, kl = (
        finite(meter.get(name)) for name in ("base_accuracy", "adapter_accuracy", "forgetting", "kl")
    )
    if base is None or adapter is None or lost is None or kl is None:
        return None
    return ShownForgetting(
        format_percent(lost) if lost else "",
        mapping(meter.get("interval")).get("beyond_chance") is not True,
        count(meter.get("num_questions")) or 0,
        format_percent(base),
        format_percent(adapter),
        format_number(kl),
    )


def _gate(found: dict[str, Any]) -> list[ShownCondition]:
    return [
        ShownCondition(
            words(condition.get("condition")),
            condition.get("met") is True,
            "not measured" if (value := finite(condition.get("value"))) is None else format_number(value),
        )
        for condition in mappings(found.get("gate"))[:MAX_CONDITIONS]
    ]


def _examples(found: dict[str, Any]) -> list[Conversation]:
    shown = []
    for example in mappings(found.get("examples"))[:MAX_SAMPLES]:
        expected = example.get("expected")
        known, scores = None if expected is None else words(expected), mapping(example.get("scores"))
        sides = [
            answer(kind, label + _log_probs(scores.get(name)), words(example.get(name)), known)
            for kind, label, name in (("before", "Base", "base"), ("after", "Adapter", "adapter"))
            if example.get(name) is not None
        ]
        shown.append(conversation(words(example.get("prompt")), sides, known))
    return shown


def _log_probs(found: object) -> str:
    """Of both answers of a pair."""
    chosen, rejected = (finite(mapping(found).get(name)) for name in ("chosen", "rejected"))
    if chosen is None or rejected is None:
        return ""
    return f" prefers (log-probabilities: chosen {format_number(chosen)}, rejected {format_number(rejected)})"
