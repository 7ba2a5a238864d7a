"""The adapters of a run that trains several together, as a table and in sentences, and their scores on every phase."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trillora.events import Score
from trillora.report.numbers import format_count, format_loss, format_percent
from trillora.report.run.adapters import NOT_ENDED, AdapterRecord, edge_of_rates
from trillora.report.run.curves.several_adapters import Look, looks_of
from trillora.report.run.parse import words
from trillora.report.run.read import RunRecord

MAX_PHASES = 64
MAX_ROWS = 70  # of the scores
MAX_NAMED = 4  # adapters in a sentence


@dataclass(frozen=True)
class AdaptersTable:
    adapters: list[AdapterRecord]  # in the order of the table
    looks: dict[str, Look]
    best: AdapterRecord | None
    has_rank: bool
    has_seed: bool
    merged: str  # how and where the adapters were merged into one
    merged_folder: str
    has_dropped: bool  # adapters with a loss from an earlier part of the run


@dataclass(frozen=True)
class ScoreCell:
    kinds: str  # CSS classes
    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class ScoresTable:
    rows: str  # which rows were scored
    phases: list[str]
    lines: list[tuple[str, list[ScoreCell | None]]]  # an adapter and its scores


def adapters_table(run: RunRecord) -> AdaptersTable:
    best, adapters = run.best, list(run.adapters)
    if run.manifest.group.kind in ("sweep", "auto"):  # phases have different data, so their losses are not compared
        adapters.sort(key=lambda adapter: (adapter is not best, run.rank_of(adapter), -adapter.last_step))
    folder, method = words(run.result.merged.get("folder")), words(run.result.merged.get("method"))
    return AdaptersTable(
        adapters,
        looks_of(run),
        best,
        has_rank=any(adapter.plan.rank is not None for adapter in adapters),
        has_seed=any(adapter.plan.seed is not None for adapter in adapters),
        merged=f"The adapters merged into one{f' ({method})' if method else ''}:" if folder or method else "",
        merged_folder=folder,
        has_dropped=any(a.status == "dropped" and a.best_loss is not None for a in adapters),
    )


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
        base = f"; the base model has {format_loss(best.base_loss)}" if best.base_loss is not None else ""
        what = f"evaluation loss {format_loss(best.best_loss)}"
        if run.compares_betas and best.best is not None:  # losses of different betas are not comparable
            what, base = f"{format_percent(best.best.accuracy)} of the pairs right", ""
        lines.append(f"Best: {best.name} with {what}{at}{base}.")
    if best is not None and (
        hint := edge_of_rates(best.plan.learning_rate, [a.plan.learning_rate for a in run.adapters])
    ):
        lines.append(hint)
    return tuple(lines)


def scores_table(run: RunRecord) -> ScoresTable | None:
    """A row for the base model, each adapter and the merged one; a column for each phase."""
    if run.scored is None or not run.scored.scores:
        return None
    found = {(score.adapter, score.phase): score for score in run.scored.scores}
    phases = list(dict.fromkeys(score.phase for score in run.scored.scores))[:MAX_PHASES]
    adapters = list(dict.fromkeys(score.adapter for score in run.scored.scores))[:MAX_ROWS]
    lowest: dict[str, float] = {}
    for score in found.values():
        if math.isfinite(score.loss):
            lowest[score.phase] = min(score.loss, lowest.get(score.phase, math.inf))
    lines = [
        (adapter, [_cell(found.get((adapter, phase)), lowest.get(phase)) for phase in phases]) for adapter in adapters
    ]
    return ScoresTable(run.scored.rows or "held-out", phases, lines)


def _cell(score: Score | None, lowest: float | None) -> ScoreCell | None:
    if score is None:
        return None
    kinds = ["number"]
    kinds += ["own"] if score.adapter == score.phase else []
    kinds += ["lowest"] if score.loss == lowest else []
    return ScoreCell(" ".join(kinds), score.loss, round(score.accuracy, 3) if math.isfinite(score.accuracy) else None)
