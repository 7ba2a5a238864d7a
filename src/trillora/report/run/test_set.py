"""The test set scores of `trillora eval` in report.html: base and adapter, with the change and its interval.

`eval.json` may be damaged: what is missing is not shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trillora.evaluation.result import LABELS, NOT_SHARES, shown_metrics
from trillora.report.html import text
from trillora.report.numbers import format_number, format_percent
from trillora.report.run.parse import count, finite, mapping, mappings, number, words
from trillora.report.run.read import RunRecord
from trillora.report.run.results import MAX_SAMPLES, answer_box, conversation

MAX_FIELDS = 60
MAX_FILES = 100
MAX_CONDITIONS = 100
LONGER_LABELS = {**LABELS, "right_fields": "JSON with the expected fields", "choice_accuracy": "multiple choice"}

STYLE = """
.scores td, .scores th { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); }
.scores tr:last-child td { border-bottom: 0; }
.scores .group td { color: var(--faint); font-size: .85rem; padding-top: .9rem; }
.scores td.number { width: 20%; min-width: 4.6rem; }
.meter { height: 5px; border-radius: 3px; background: var(--line); margin-top: .3rem; overflow: hidden; }
.meter i { display: block; height: 100%; border-radius: 3px; background: var(--masked); }
.adapted .meter i { background: var(--trained); } .guess .meter i { background: var(--padded); }
td.adapted { font-weight: 600; }
.change small { display: block; color: var(--faint); font-weight: 400; }
.change.chance { color: var(--faint); }
.aside { border-top: 1px solid var(--line); margin-top: 1rem; padding-top: .8rem; }
.aside .badge { margin-left: 0; margin-right: .5rem; min-width: 4rem; text-align: center; }
.aside .badge.no { color: var(--bad); border-color: var(--bad); }
"""


def test_set(run: RunRecord) -> str:
    found = run.evaluated
    if not mapping(found.get("base")) and not mapping(found.get("adapter")):
        return ""
    files = mappings(found.get("files"))[:MAX_FILES]
    kind = words(found.get("kind")) or "json"
    if not files:
        name = text(words(found.get("data")) or "test set")
        shown = f'<div class="faint">{name}{_rows(found)}</div>{_table(found, shown_metrics(kind))}{_examples(found)}'
    else:
        shared = _shared(files)
        mean = f'<div class="faint">Mean of the files{_rows(found)}</div>{_table(found, shared)}' if shared else ""
        shown = mean + "".join(_file(file) for file in files)
    return "".join([shown, _forgetting(mapping(found.get("forgetting"))), _gate(found)])


def _shared(files: Sequence[dict[str, Any]]) -> list[str]:
    """The metrics that several files show: only their means say something new."""
    shown = [(shown_metrics(words(file.get("kind"))), mapping(file.get("adapter"))) for file in files]
    return [
        name for name in LABELS if sum(name in names and number(of.get(name)) is not None for names, of in shown) > 1
    ]


def _file(found: dict[str, Any]) -> str:
    """One of several files, folded; its first score is in the summary."""
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
    title = text(words(found.get("label")) or words(found.get("data")) or "file")
    return (
        f"<details><summary>{title}{_rows(found)}{headline}</summary>{_table(found, every)}{_examples(found)}</details>"
    )


def _rows(found: dict[str, Any]) -> str:
    rows = count(found.get("num_rows"))
    return f", {rows:,} rows" if rows is not None else ""


def _table(found: dict[str, Any], metrics: Sequence[str]) -> str:
    base, adapter, guess, changes = (mapping(found.get(name)) for name in ("base", "adapter", "majority", "intervals"))
    chance = finite(found.get("chance"))
    names = ("base", "adapter", "change, 95 %" if changes else "", "majority guess" if guess or chance else "")
    lines = ["<tr><th></th>" + "".join(f'<th class="number">{name}</th>' for name in names) + "</tr>"]
    for name in metrics:
        change, guessed = mapping(changes.get(name)), chance if name.startswith("choice") else None
        values = [base.get(name), adapter.get(name), guessed]
        lines.append(_line(LONGER_LABELS[name], values, change, share=name not in NOT_SHARES))
    of_base, of_adapter = (mapping(part.get("fields")) for part in (base, adapter))
    fields = list(dict.fromkeys([*of_adapter, *of_base, *guess]))
    if fields:
        lines.append('<tr class="group"><td colspan="5">correct values by field</td></tr>')
    for name in fields[:MAX_FIELDS]:
        values = [part.get(name) for part in (of_base, of_adapter, guess)]
        lines.append(_line(name, values, mapping(changes.get(f"fields.{name}"))))
    return f'<div class="scroll"><table class="scores">{"".join(lines)}</table></div>'


def _line(label: str, values: Sequence[Any], change: dict[str, Any], *, share: bool = True) -> str:
    """Values of base and adapter, and of guessing."""
    known = [finite(value) if share else number(value) for value in values]
    if all(value is None for value in known):
        return ""
    base, adapter, guess = (
        f'<td class="number{kind}">{_meter(value) if share else "" if value is None else format_number(value)}</td>'
        for kind, value in zip(("", " adapted", " guess"), known, strict=True)
    )
    return f'<tr><td class="name">{text(label)}</td>{base}{adapter}{_change(change, share)}{guess}</tr>'


def _change(change: dict[str, Any], share: bool) -> str:
    """The difference, and below it the interval; faint if it is within chance."""
    values = [finite(change.get(name)) for name in ("difference", "low", "high")]
    if any(value is None for value in values):
        return "<td></td>"
    difference, low, high = (_signed(value or 0.0, share) for value in values)
    kind = "" if change.get("beyond_chance") is True else " chance"
    hint = "" if not kind else ' title="The interval contains 0: the change may be chance."'
    return f'<td class="number change{kind}"{hint}>{difference}<small>{low} to {high}</small></td>'


def _signed(value: float, share: bool) -> str:
    """Of shares in percentage points."""
    if share:
        return f"{100 * value:+.1f}".replace("-", "\u2212")
    return ("\u2212" if value < 0 else "+") + format_number(abs(value))


def _meter(share: float | None) -> str:
    if share is None:
        return ""
    return f'{format_percent(share)}<div class="meter"><i style="width:{min(max(share, 0), 1):.1%}"></i></div>'


def _forgetting(meter: dict[str, Any]) -> str:
    base, adapter, lost, kl = (
        finite(meter.get(name)) for name in ("base_accuracy", "adapter_accuracy", "forgetting", "kl")
    )
    if base is None or adapter is None or lost is None or kl is None:
        return ""
    questions = count(meter.get("num_questions")) or 0
    by_chance = mapping(meter.get("interval")).get("beyond_chance") is not True
    result = f"<b>{format_percent(lost)}</b> of the general questions lost" if lost else "<b>nothing lost</b>"
    return (
        f'<div class="aside"><b>Forgetting</b>: {result}{" (within chance)" if lost and by_chance else ""}. '
        f"{questions:,} general questions: base {format_percent(base)}, adapter {format_percent(adapter)} right. "
        f'<span class="faint">KL from the base on general texts: {format_number(kl)} per token.</span></div>'
    )


def _gate(found: dict[str, Any]) -> str:
    lines = []
    for condition in mappings(found.get("gate"))[:MAX_CONDITIONS]:
        met, value = condition.get("met") is True, finite(condition.get("value"))
        badge = f'<span class="badge{"" if met else " no"}">{"met" if met else "not met"}</span>'
        measured = "not measured" if value is None else format_number(value)
        shown = text(words(condition.get("condition")))
        lines.append(f'<div>{badge}<code>{shown}</code> <span class="faint">{measured}</span></div>')
    return f'<div class="aside"><b>Gate</b>{"".join(lines)}</div>' if lines else ""


def _examples(found: dict[str, Any]) -> str:
    shown = []
    for example in mappings(found.get("examples"))[:MAX_SAMPLES]:
        expected = example.get("expected")
        known = None if expected is None else words(expected)
        sides = [
            answer_box(kind, label, words(example.get(name)), known)
            for kind, label, name in (("before", "Base", "base"), ("after", "Adapter", "adapter"))
            if example.get(name) is not None
        ]
        if known is not None:
            sides.append(answer_box("expected", "Expected", known, None))
        shown.append(conversation(words(example.get("prompt")), sides))
    if not shown:
        return ""
    return f"<details><summary>Examples from the test set: {len(shown)}</summary>{''.join(shown)}</details>"
