"""Results of a run: the model's answers before and after training, and the test set scores of `trillora eval`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from trillora.evaluation.scores import is_right
from trillora.events import Sample, Sampled
from trillora.report.html import text
from trillora.report.numbers import format_number, format_percent
from trillora.report.run.parse import count, finite, mapping, mappings, number, words
from trillora.report.run.read import RunRecord

MAX_SAMPLES = 12
MAX_CHARACTERS = 3000  # of one text; a longer one loses its middle
MAX_FIELDS = 60

STYLE = """
.sample { border-top: 1px solid var(--line); padding-top: .9rem; margin-top: 1.1rem; }
.sample:first-of-type { border-top: 0; padding-top: 0; margin-top: 0; }
.prompt { white-space: pre-wrap; overflow-wrap: anywhere; max-height: 14rem; overflow-y: auto; margin-top: .15rem; }
.says { display: grid; grid-template-columns: repeat(auto-fit, minmax(14.5rem, 1fr)); gap: .75rem; margin-top: .7rem; }
.says > div { min-width: 0; }
.says pre { margin-top: .25rem; max-height: 20rem; overflow-y: auto; border: 1px solid var(--line); line-height: 1.5; }
.says .after pre { border-color: var(--trained); }
.label { font-size: .8rem; color: var(--faint); }
.badge { display: inline-block; border-radius: 99px; padding: 0 .5rem; margin-left: .4rem; font-size: .75rem;
  background: var(--trained-back); color: var(--trained); }
.badge.no { background: none; color: var(--faint); border: 1px solid var(--line); }
.scores td, .scores th { padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); }
.scores tr:last-child td { border-bottom: 0; }
.scores .group td { color: var(--faint); font-size: .85rem; padding-top: .9rem; }
.scores td.number { width: 22%; min-width: 4.6rem; }
.meter { height: 5px; border-radius: 3px; background: var(--line); margin-top: .3rem; overflow: hidden; }
.meter i { display: block; height: 100%; border-radius: 3px; background: var(--masked); }
.adapted .meter i { background: var(--trained); } .guess .meter i { background: var(--padded); }
td.adapted { font-weight: 600; }
"""


def samples(run: RunRecord) -> str:
    """For each prompt, its first and its last answer. Each of several adapters has prompts of its own."""
    if not run.adapters:
        return _samples(run.samples, MAX_SAMPLES)
    names = list(dict.fromkeys(event.stage for event in run.samples))
    most = max(MAX_SAMPLES // max(len(names), 1), 1)
    return "".join(
        f"<h3>{text(name)}</h3>{_samples([event for event in run.samples if event.stage == name], most)}"
        for name in names[: 2 * MAX_SAMPLES]
    )


def _samples(events: list[Sampled], most: int) -> str:
    by_prompt: dict[str, list[tuple[int, Sample]]] = {}
    for event in events:
        for sample in event.samples:
            by_prompt.setdefault(sample.prompt, []).append((event.step, sample))
    latest_first = sorted(by_prompt.values(), key=lambda answers: -answers[-1][0])
    shown = "".join(_sample(answers) for answers in latest_first[:most])
    if len(by_prompt) > most:
        shown += f'<p class="faint">{len(by_prompt) - most:,} more prompts are in metrics.jsonl.</p>'
    return shown


def _sample(answers: list[tuple[int, Sample]]) -> str:
    (first_step, first), (last_step, last) = answers[0], answers[-1]
    sides = []
    if len(answers) > 1:
        sides.append(_answer("before", f"Before, {_when(first_step)}", first.answer, last.expected))
    side = "after" if last_step else "before"
    sides.append(_answer(side, f"{side.capitalize()}, {_when(last_step)}", last.answer, last.expected))
    if last.expected is not None:
        sides.append(_answer("expected", "Expected", last.expected, None))
    return _conversation(last.prompt, sides)


def _when(step: int) -> str:
    return f"step {step:,}" if step else "the base model"


def _conversation(prompt: str, sides: Iterable[str]) -> str:
    question = f'<div class="label">Prompt</div><div class="prompt">{text(shorter(prompt))}</div>'
    return f'<div class="sample">{question}<div class="says">{"".join(sides)}</div></div>'


def _answer(side: str, label: str, answer: str, expected: str | None) -> str:
    badge = ""
    if expected is not None:
        right = is_right(expected, answer)
        badge = '<span class="badge">as expected</span>' if right else '<span class="badge no">not as expected</span>'
    body = text(shorter(answer)) if answer else '<span class="gap">empty</span>'
    return f'<div class="{side}"><span class="label">{text(label)}</span>{badge}<pre>{body}</pre></div>'


def shorter(long: str) -> str:
    if len(long) <= MAX_CHARACTERS:
        return long
    half = MAX_CHARACTERS // 2
    return f"{long[:half]}\n[… {len(long) - 2 * half:,} characters …]\n{long[-half:]}"


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
            _answer(kind, label, words(example.get(name)), known)
            for kind, label, name in (("before", "Base", "base"), ("after", "Adapter", "adapter"))
            if example.get(name) is not None
        ]
        if known is not None:
            sides.append(_answer("expected", "Expected", known, None))
        shown.append(_conversation(words(example.get("prompt")), sides))
    if not shown:
        return ""
    return f"<details><summary>Examples from the test set: {len(shown)}</summary>{''.join(shown)}</details>"
