"""The test set scores of `trillora eval` in report.html."""

from __future__ import annotations

from typing import Any

from trillora.report.html import text
from trillora.report.numbers import format_number, format_percent
from trillora.report.run.parse import count, finite, mapping, mappings, number, words
from trillora.report.run.read import RunRecord
from trillora.report.run.results import MAX_SAMPLES, answer_box, conversation

MAX_FIELDS = 60

STYLE = """
.scores td, .scores th { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); }
.scores tr:last-child td { border-bottom: 0; }
.scores .group td { color: var(--faint); font-size: .85rem; padding-top: .9rem; }
.scores td.number { width: 22%; min-width: 4.6rem; }
.meter { height: 5px; border-radius: 3px; background: var(--line); margin-top: .3rem; overflow: hidden; }
.meter i { display: block; height: 100%; border-radius: 3px; background: var(--masked); }
.adapted .meter i { background: var(--trained); } .guess .meter i { background: var(--padded); }
td.adapted { font-weight: 600; }
"""


def test_set(run: RunRecord) -> str:
    found = run.evaluated
    base, adapter, guess = (mapping(found.get(name)) for name in ("base", "adapter", "majority"))
    if not base and not adapter:
        return ""
    rows = count(found.get("num_rows"))
    what = text(words(found.get("data")) or "test set") + (f", {rows:,} rows" if rows is not None else "")
    head = '<tr><th></th><th class="number">base</th><th class="number">adapter</th><th class="number">{}</th></tr>'
    lines = [head.format("majority guess" if guess else "")]
    for name in ("loss", "perplexity"):
        values = [number(part.get(name)) for part in (base, adapter)]
        if any(value is not None for value in values):
            cells = "".join(
                f'<td class="number{kind}">{format_number(value)}</td>'
                for kind, value in zip(("", " adapted"), values, strict=True)
            )
            lines.append(f"<tr><td>{name}</td>{cells}<td></td></tr>")
    shares = (
        ("accuracy", "token accuracy"),
        ("exact_match", "exact match"),
        ("valid_json", "valid JSON"),
        ("right_fields", "JSON with the expected fields"),
    )
    lines += [_share_line(label, base, adapter, {}, name) for name, label in shares]
    of_base, of_adapter = (mapping(part.get("fields")) for part in (base, adapter))
    names = list(dict.fromkeys([*of_adapter, *of_base, *guess]))
    if names:
        lines.append('<tr class="group"><td colspan="4">correct values by field</td></tr>')
        lines += [_share_line(n, of_base, of_adapter, guess, n) for n in names[:MAX_FIELDS]]
    table = f'<div class="scroll"><table class="scores">{"".join(lines)}</table></div>'
    return f'<div class="faint">{what}</div>{table}{_examples(found)}'


def _share_line(label: str, base: dict[str, Any], adapter: dict[str, Any], guess: dict[str, Any], name: str) -> str:
    columns = [(kind, finite(part.get(name))) for kind, part in (("", base), (" adapted", adapter), (" guess", guess))]
    if all(value is None for _, value in columns):
        return ""
    cells = "".join(f'<td class="number{kind}">{_meter(value)}</td>' for kind, value in columns)
    return f'<tr><td class="name">{text(label)}</td>{cells}</tr>'


def _meter(share: float | None) -> str:
    if share is None:
        return ""
    return f'{format_percent(share)}<div class="meter"><i style="width:{min(max(share, 0), 1):.1%}"></i></div>'


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
