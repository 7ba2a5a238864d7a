"""The adapters of a run that trains several together, as a table and in sentences, and their scores on every phase."""

from __future__ import annotations

import math

from trillora.events import Score
from trillora.report.html import text
from trillora.report.numbers import format_count, format_number, format_percent, format_rate
from trillora.report.run.adapter_curves import Look, looks_of
from trillora.report.run.adapters import NOT_ENDED, AdapterRecord
from trillora.report.run.parse import words
from trillora.report.run.read import RunRecord

MAX_PHASES = 64
MAX_ROWS = 70  # of the scores
MAX_NAMED = 4  # adapters in a sentence
MAX_OPEN = 16  # adapters; the rest is folded

STYLE = """
.adapters td, .adapters th { border-bottom: 1px solid var(--line); padding: .35rem .9rem .35rem 0; }
.adapters tr:last-child td { border-bottom: 0; }
.adapters td.name { min-width: 9rem; } .adapters td.status { overflow-wrap: anywhere; min-width: 9rem; }
.adapters td code { white-space: normal; }
.swatch { display: inline-block; width: 1.1rem; height: 0; border-top: 3px solid; vertical-align: middle;
  margin-right: .45rem; }
.won-row td { font-weight: 600; } td.bad { color: var(--bad); } td small { color: var(--faint); font-weight: 400; }
.matrix td, .matrix th { padding: .4rem .8rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
.matrix tr > :first-child { position: sticky; left: 0; background: var(--card); padding-left: 0; max-width: 12rem;
  overflow: hidden; text-overflow: ellipsis; }
.matrix th.number { max-width: 12rem; overflow: hidden; text-overflow: ellipsis; }
.matrix td.own { background: var(--back); } .matrix td.lowest { color: var(--trained); font-weight: 600; }
h3 + .sample { border-top: 0; padding-top: 0; margin-top: 0; }
.matrix .apart td { border-top: 2px solid var(--line); }
"""


def adapters_table(run: RunRecord) -> str:
    looks, best = looks_of(run), run.best
    adapters = list(run.adapters)
    if run.manifest.group.kind in ("sweep", "auto"):  # phases have different data, so their losses are not compared
        adapters.sort(key=lambda a: (a is not best, math.inf if a.best_loss is None else a.best_loss, -a.last_step))
    has_rank, has_seed = (any(getattr(a.plan, name) is not None for a in adapters) for name in ("rank", "seed"))
    head = (
        '<tr><th>name</th><th class="number">learning rate</th>'
        + ('<th class="number">rank</th>' if has_rank else "")
        + ('<th class="number">seed</th>' if has_seed else "")
        + '<th class="number">steps</th><th>status</th><th class="number">best loss</th><th>folder</th></tr>'
    )
    lines = [
        _adapter(adapter, looks[adapter.name], adapter is best, has_rank=has_rank, has_seed=has_seed)
        for adapter in adapters
    ]
    first, more = (_table(head, part) for part in (lines[:MAX_OPEN], lines[MAX_OPEN:]))
    folded = f"<details><summary>{len(lines) - MAX_OPEN:,} more adapters</summary>{more}</details>" if more else ""
    return first + folded + _merged(run) + _dropped_note(run)


def _table(head: str, lines: list[str]) -> str:
    return f'<div class="scroll"><table class="adapters">{head}{"".join(lines)}</table></div>' if lines else ""


def _adapter(adapter: AdapterRecord, look: Look, is_best: bool, *, has_rank: bool, has_seed: bool) -> str:
    plan = adapter.plan
    steps = f"{adapter.last_step:,}"
    if plan.num_steps and adapter.last_step < plan.num_steps:
        steps += f" <small>of {plan.num_steps:,}</small>"
    badge = '<span class="badge">best</span>' if is_best else ""
    loss = "" if adapter.best_loss is None else _loss(adapter.best_loss)
    at = f" <small>step {adapter.best_step:,}</small>" if loss and adapter.best_step is not None else ""
    reason = f"<br><small>{text(adapter.reason)}</small>" if adapter.reason else ""
    kind = "status bad" if adapter.status == "diverged" else "status"
    cells = [
        f'<td class="name"><i class="swatch {look.classes}"></i>{text(adapter.name)}{badge}</td>',
        f'<td class="number">{"" if plan.learning_rate is None else format_rate(plan.learning_rate)}</td>',
        f'<td class="number">{"" if plan.rank is None else plan.rank}</td>' if has_rank else "",
        f'<td class="number">{"" if plan.seed is None else plan.seed}</td>' if has_seed else "",
        f'<td class="number">{steps}</td><td class="{kind}">{text(adapter.status)}{reason}</td>',
        f'<td class="number">{loss}{at}</td><td class="folder"><code>{text(adapter.folder or "")}</code></td>',
    ]
    return ('<tr class="won-row">' if is_best else "<tr>") + "".join(cells) + "</tr>"


def _merged(run: RunRecord) -> str:
    folder, method = words(run.result.merged.get("folder")), words(run.result.merged.get("method"))
    if not folder and not method:
        return ""
    how = f" ({text(method)})" if method else ""
    return f"<p>The adapters merged into one{how}: <code>{text(folder)}</code></p>"


def _dropped_note(run: RunRecord) -> str:
    if not any(adapter.status == "dropped" and adapter.best_loss is not None for adapter in run.adapters):
        return ""
    note = "Dropped adapters were trained for fewer steps, so their best losses are from an earlier part of the run."
    return f'<p class="faint">{note}</p>'


def _loss(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else format_number(value)


def summary(run: RunRecord) -> tuple[str, ...]:
    """How many adapters ended how, and which one won."""
    by_status: dict[str, list[str]] = {}
    for adapter in run.adapters:
        by_status.setdefault(adapter.status, []).append(adapter.name)
    parts = []
    for status, names in by_status.items():
        named = f" ({', '.join(names)})" if status == "diverged" and len(names) <= MAX_NAMED else ""
        parts.append(f"{len(names):,} {status}{named}")
    if set(by_status) <= {NOT_ENDED}:
        parts = []
    ended = f": {', '.join(parts)}" if parts else ""
    lines = [f"{format_count(len(run.adapters), 'adapter', 'adapters')}{ended}."]
    best = run.best
    if best is not None and best.best_loss is not None:
        at = f" at step {best.best_step:,}" if best.best_step is not None else ""
        base = f"; the base model has {_loss(best.base_loss)}" if best.base_loss is not None else ""
        lines.append(f"Best: {best.name} with evaluation loss {_loss(best.best_loss)}{at}{base}.")
    return tuple(lines)


def scores_table(run: RunRecord) -> str:
    """A row for the base model, each adapter and the merged one; a column for each phase."""
    if run.scored is None or not run.scored.scores:
        return ""
    found = {(score.adapter, score.phase): score for score in run.scored.scores}
    phases = list(dict.fromkeys(score.phase for score in run.scored.scores))[:MAX_PHASES]
    adapters = list(dict.fromkeys(score.adapter for score in run.scored.scores))[:MAX_ROWS]
    lowest: dict[str, float] = {}
    for score in found.values():
        if math.isfinite(score.loss):
            lowest[score.phase] = min(score.loss, lowest.get(score.phase, math.inf))
    head = "".join(f'<th class="number">{text(phase)}</th>' for phase in phases)
    lines = []
    for adapter in adapters:
        cells = "".join(_score(found.get((adapter, phase)), lowest.get(phase)) for phase in phases)
        apart = ' class="apart"' if adapter == "merged" else ""
        lines.append(f"<tr{apart}><td>{text(adapter)}</td>{cells}</tr>")
    rows = text(run.scored.rows or "held-out")
    note = f"Loss and token accuracy on the {rows} rows of each phase. Shaded: the adapter of the phase. "
    note += "Green: the lowest loss of the phase."
    table = f'<table class="matrix"><tr><th></th>{head}</tr>{"".join(lines)}</table>'
    return f'<div class="faint">{note}</div><div class="scroll">{table}</div>'


def _score(score: Score | None, lowest: float | None) -> str:
    if score is None:
        return "<td></td>"
    kinds = [
        "number",
        *(["own"] if score.adapter == score.phase else []),
        *(["lowest"] if score.loss == lowest else []),
    ]
    share = format_percent(round(score.accuracy, 3)) if math.isfinite(score.accuracy) else ""
    return f'<td class="{" ".join(kinds)}">{_loss(score.loss)}<br><small>{share}</small></td>'
