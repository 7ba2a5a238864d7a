"""The curves of a run: loss, learning rate, throughput."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import groupby
from math import isfinite

from trillora.events import Preferences, Step
from trillora.report.numbers import format_number, format_rate, format_short
from trillora.report.run.curves.chart import (
    MAX_MARKS,
    MAX_STRIPS,
    Chart,
    Drawings,
    Line,
    Point,
    calmed,
    nice_ticks,
    smoothed,
    spread,
)
from trillora.report.run.read import RunRecord

_PREFERENCES: dict[str, Callable[[Preferences], float]] = {
    "Reward margin": lambda found: found.rewards_margins,
    "Log-probability of chosen answers": lambda found: found.logps_chosen,
}


def curves(run: RunRecord) -> Drawings:
    if not run.steps and not run.evaluations:
        return Drawings([], [])
    first, last = 0 if run.evaluations and run.evaluations[0].step == 0 else 1, max(run.last_step, 2)
    borders = _borders(run)
    small = [
        small_chart(run, "Learning rate", lambda step: step.learning_rate, format_rate, False, first, last, borders),
        small_chart(
            run, "Tokens per second", lambda step: step.tokens_per_second, format_short, True, first, last, borders
        ),
    ]
    for title, of_preferences in _PREFERENCES.items():
        value_of = functools.partial(_of_preferences, of_preferences)
        small.append(small_chart(run, title, value_of, format_number, True, first, last, borders))
    loss = _loss(run, first, last, borders)
    return Drawings([loss.drawn()] if loss else [], [chart.drawn() for chart in small if chart])


def _borders(run: RunRecord) -> list[tuple[float, str]]:
    """The step before each stage and the stage's name: from run.json, or from the steps where that is missing."""
    stages = [stage for stage in run.manifest.stages if stage.first_step is not None]
    planned = [(float(max((stage.first_step or 0) - 1, 0)), stage.name) for stage in stages]
    return planned or [(next(steps).step - 1.0, name) for name, steps in groupby(run.steps, lambda step: step.stage)]


def _loss(run: RunRecord, first: int, last: int, borders: list[tuple[float, str]]) -> Chart | None:
    trained = groupby(run.steps, lambda step: step.stage)
    raw = [stretch for _, steps in trained if (stretch := _finite(steps, lambda step: step.loss))]
    smooth = [smoothed(calmed(stretch), max(len(stretch) / 30, 1)) for stretch in raw]
    evaluated = groupby(sorted(run.evaluations, key=lambda e: e.stage), lambda e: e.stage)
    evaluations = [
        stretch for _, events in evaluated if (stretch := [(float(e.step), e.loss) for e in events if isfinite(e.loss)])
    ]
    values = [y for stretch in (*raw, *evaluations) for _, y in stretch]
    if not values:
        return None
    calm = [y for stretch in (*smooth, *evaluations) for _, y in stretch]
    ticks = nice_ticks(min(values), highest(values, max(calm)), 5)
    low, high = ticks[0], ticks[-1]
    missed = [(float(step.step), low) for step in run.steps if step.skipped or not isfinite(step.loss)]
    cut = [(x, y) for stretch in raw for x, y in stretch if y > high]
    best = [e for e in run.evaluations if e.is_best and isfinite(e.loss)][-1:]
    key = [("smooth", "line", "training, smoothed"), ("raw", "line", "each step")] if raw else []
    key += [("evaluation", "dot", "evaluation")] if evaluations else []
    key += [("best", "dot", f"best {format_number(e.loss)}, step {e.step:,}") for e in best]
    key += [("missed", "dot", "skipped")] if missed else []
    key += [("cut", "dot", f"above the chart, up to {format_number(max(y for _, y in cut))}")] if cut else []
    return Chart(
        title="Loss",
        lines=[Line("raw", raw), Line("smooth", smooth), Line("evaluation", evaluations)],
        first=first,
        last=last,
        format=lambda value: f"{value:g}",
        low=low,
        high=high,
        key=key,
        dots=[
            ("best ring", [(float(e.step), e.loss) for e in best]),
            ("evaluation dots", [point for stretch in evaluations for point in stretch]),
            ("cut", cut),
            ("missed", missed),
        ],
        borders=borders,
        hover=_hover(run, smooth),
    )


def highest(values: list[float], calm: float) -> float:
    """The top of the chart: the largest value, unless a few spikes would flatten the rest of the curve."""
    ranked = sorted(values)
    usual = max(ranked[int(0.97 * (len(ranked) - 1))], calm)
    low, top = ranked[0], ranked[-1]
    return top if top - low <= 1.5 * (usual - low) else usual + 0.08 * (usual - low)


def _hover(run: RunRecord, smooth: list[list[Point]]) -> list[tuple[float, str]]:
    means = {x: y for stretch in smooth for x, y in stretch}
    words: dict[float, list[str]] = {}
    for step in spread(run.steps, MAX_STRIPS):
        parts = [f"step {step.step:,}" + (f" · {step.stage}" if len(run.manifest.stages) > 1 else "")]
        parts.append("skipped" if step.skipped else f"loss {format_number(step.loss)}")
        if step.step in means:
            parts.append(f"smoothed {format_number(means[step.step])}")
        words[step.step] = parts
    for evaluation in spread(run.evaluations, MAX_MARKS):
        parts = words.setdefault(evaluation.step, [f"step {evaluation.step:,}"])
        parts.append(f"evaluation {format_number(evaluation.loss)}")
    return [(place, "\n".join(words[place])) for place in sorted(words)]


def small_chart(
    run: RunRecord,
    title: str,
    value_of: Callable[[Step], float | None],
    format: Callable[[float], str],
    is_noisy: bool,
    first: int,
    last: int,
    borders: list[tuple[float, str]],
) -> Chart | None:
    points = _finite(run.steps, value_of)
    if not points or not any(y for _, y in points):
        return None
    smooth = smoothed(calmed(points), max(len(points) / 100, 1)) if is_noisy else points
    return Chart(
        title=title,
        lines=[*([Line("raw", [points])] if is_noisy else []), Line("smooth", [smooth])],
        first=first,
        last=last,
        format=format,
        low=min(0.0, *(y for _, y in points)),
        high=max(0.0, *(y for _, y in points)),
        borders=borders,
        hover=[(x, f"step {int(x):,}\n{format(y)}") for x, y in spread(points, MAX_STRIPS)],
        small=True,
    )


def _of_preferences(value_of: Callable[[Preferences], float], step: Step) -> float | None:
    return None if step.preferences is None else value_of(step.preferences)


def _finite(steps: Iterable[Step], value_of: Callable[[Step], float | None]) -> list[Point]:
    pairs = ((float(step.step), value_of(step)) for step in steps)
    return [(x, y) for x, y in pairs if y is not None and isfinite(y)]
