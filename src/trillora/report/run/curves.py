"""Which curves a run has: loss, learning rate, throughput, memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import groupby

from trillora.report.numbers import format_number, format_rate, format_short
from trillora.report.run.charts import (
    MAX_MARKS,
    MAX_STRIPS,
    Chart,
    Line,
    Point,
    calmed,
    nice_ticks,
    smoothed,
    spread,
)
from trillora.report.run.read import RunRecord, StepLine


def curves(run: RunRecord) -> str:
    if not run.steps and not run.evaluations:
        return ""
    first, last = 0 if run.evaluations and run.evaluations[0].step == 0 else 1, max(run.last_step, 2)
    borders = _borders(run)
    small = [
        _small(run, "Learning rate", lambda line: line.learning_rate, format_rate, as_it_is, first, last, borders),
        _small(
            run, "Tokens per second", lambda line: line.tokens_per_second, format_short, as_noise, first, last, borders
        ),
        _small(run, "Memory, GiB", lambda line: line.memory_gib, format_short, as_it_is, first, last, borders),
    ]
    drawn = [chart.html() for chart in small if chart]
    loss = _loss(run, first, last, borders)
    return (loss.html() if loss else "") + (f'<div class="charts">{"".join(drawn)}</div>' if drawn else "")


def _borders(run: RunRecord) -> list[tuple[float, str]]:
    """Where each stage begins: as planned, else as it happened."""
    planned = [
        (float(max(stage.first_step - 1, 0)), stage.name) for stage in run.stages if stage.first_step is not None
    ]
    return planned or [(next(lines).step - 1.0, name) for name, lines in groupby(run.steps, lambda line: line.stage)]


def _loss(run: RunRecord, first: int, last: int, borders: list[tuple[float, str]]) -> Chart | None:
    raw = [_finite(lines, lambda line: line.loss) for lines in _by_stage(run)]
    raw = [stretch for stretch in raw if stretch]
    smooth = [smoothed(calmed(stretch), max(len(stretch) / 30, 2)) for stretch in raw]
    evaluations = [
        [(float(e.step), e.loss) for e in lines if e.loss is not None and math.isfinite(e.loss)]
        for _, lines in groupby(sorted(run.evaluations, key=lambda e: e.stage), lambda e: e.stage)
    ]
    evaluations = [stretch for stretch in evaluations if stretch]
    values = [y for stretch in (*raw, *evaluations) for _, y in stretch]
    if not values:
        return None
    calm = [y for stretch in (*smooth, *evaluations) for _, y in stretch]
    ticks = nice_ticks(min(values), _highest(values, max(calm)), 5)
    low, high = ticks[0], ticks[-1]
    missed = [(float(line.step), low) for line in run.steps if line.skipped or not _is_finite(line.loss)]
    cut = [(x, y) for stretch in raw for x, y in stretch if y > high]
    best = [
        (float(e.step), e.loss) for e in run.evaluations if e.is_best and e.loss is not None and math.isfinite(e.loss)
    ][-1:]
    key = [("smooth", "line", "training, smoothed"), ("raw", "line", "each step")] if raw else []
    key += [("evaluation", "dot", "evaluation")] if evaluations else []
    key += [("best", "dot", f"best {format_number(best[0][1])}")] if best else []
    key += [("missed", "dot", "skipped")] if missed else []
    key += [("cut", "dot", f"beyond the chart, up to {format_number(max(y for _, y in cut))}")] if cut else []
    return Chart(
        title="Loss",
        lines=[Line("raw", raw), Line("smooth", smooth), Line("evaluation", evaluations)],
        first=first,
        last=last,
        say=lambda value: f"{value:g}",
        low=low,
        high=high,
        key=key,
        dots=[
            ("best ring", best),
            ("evaluation dots", [point for stretch in evaluations for point in stretch]),
            ("cut", cut),
            ("missed", missed),
        ],
        borders=borders,
        hover=_hover(run, smooth),
    )


def _highest(values: list[float], calm: float) -> float:
    """The upper edge: the greatest value, unless a few spikes would press everything else flat."""
    ranked = sorted(values)
    usual = max(ranked[int(0.97 * (len(ranked) - 1))], calm)
    low, top = ranked[0], ranked[-1]
    return top if top - low <= 1.5 * (usual - low) else usual + 0.08 * (usual - low)


def _hover(run: RunRecord, smooth: list[list[Point]]) -> list[tuple[float, str]]:
    means = {x: y for stretch in smooth for x, y in stretch}
    words: dict[float, list[str]] = {}
    for line in spread(run.steps, MAX_STRIPS):
        parts = [f"step {line.step:,}" + (f" · {line.stage}" if len(run.stages) > 1 else "")]
        parts.append("skipped" if line.skipped else f"loss {format_number(line.loss)}")
        if line.step in means:
            parts.append(f"smoothed {format_number(means[line.step])}")
        words[line.step] = parts
    for evaluation in spread(run.evaluations, MAX_MARKS):
        parts = words.setdefault(evaluation.step, [f"step {evaluation.step:,}"])
        parts.append(f"evaluation {format_number(evaluation.loss)}")
    return [(step, "\n".join(words[step])) for step in sorted(words)]


def _small(
    run: RunRecord,
    title: str,
    value_of: Callable[[StepLine], float | None],
    say: Callable[[float], str],
    lines: Callable[[list[Point]], list[Line]],
    first: int,
    last: int,
    borders: list[tuple[float, str]],
) -> Chart | None:
    points = _finite(run.steps, value_of)
    if not points or not any(y for _, y in points):
        return None
    return Chart(
        title=title,
        lines=lines(points),
        first=first,
        last=last,
        say=say,
        low=0.0,
        high=max(y for _, y in points),
        borders=borders,
        hover=[(x, f"step {int(x):,}\n{say(y)}") for x, y in spread(points, MAX_STRIPS)],
        small=True,
    )


def as_it_is(points: list[Point]) -> list[Line]:
    return [Line("smooth", [points])]


def as_noise(points: list[Point]) -> list[Line]:
    """A measurement of every step: its course, and faintly what was measured."""
    return [Line("raw", [points]), Line("smooth", [smoothed(calmed(points), max(len(points) / 100, 1))])]


def _by_stage(run: RunRecord) -> list[list[StepLine]]:
    return [list(lines) for _, lines in groupby(run.steps, lambda line: line.stage)]


def _finite(lines: list[StepLine], value_of: Callable[[StepLine], float | None]) -> list[Point]:
    pairs = ((float(line.step), value_of(line)) for line in lines)
    return [(x, y) for x, y in pairs if y is not None and math.isfinite(y)]


def _is_finite(value: float | None) -> bool:
    return value is None or math.isfinite(value)
