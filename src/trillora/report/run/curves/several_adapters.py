"""The curves of a run that trains several adapters together: one line per adapter, in its own color.

A sweep colors its adapters by learning rate, from blue (low) to red (high); adapters of the same rate differ in their
dashes. Phases get colors that differ clearly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from trillora.report.numbers import format_number, format_rate, format_short
from trillora.report.run.adapters import AdapterRecord
from trillora.report.run.curves.chart import (
    MAX_BINS,
    MAX_STRIPS,
    Chart,
    Drawings,
    Line,
    Point,
    calmed,
    nice_ticks,
    smoothed,
    spread,
    thinned,
)
from trillora.report.run.curves.one_adapter import small_chart
from trillora.report.run.read import RunRecord

HUES = (255, 55, 150, 330, 205, 95, 295, 20)  # degrees in OKLCH; neighbors in the list differ most
LOW_HUE, HIGH_HUE = 262, 22  # of the lowest and the highest learning rate
NUM_DASHES = 4
MAX_LEGEND = 64
MAX_HOVER = 10  # adapters in the text of a strip
MAX_NAME = 40  # characters in the text of a strip
MANY = 16  # more lines are thin, and the legend has only their learning rates
MAX_RATE_LABELS = 10


@dataclass(frozen=True)
class Look:
    color: int
    dash: int

    @property
    def classes(self) -> str:
        return f"curve c{self.color} d{self.dash}" if self.dash else f"curve c{self.color}"


def looks_of(run: RunRecord) -> dict[str, Look]:
    """The look of each adapter, by name."""
    rates = _rates(run)
    if len(rates) < 2:
        return {
            adapter.name: Look(place % len(HUES), place // len(HUES) % NUM_DASHES)
            for place, adapter in enumerate(run.adapters)
        }
    num_alike: dict[int, int] = {}
    looks = {}
    for adapter in run.adapters:
        color = rates.index(rate) if (rate := _rate(adapter)) is not None else len(rates)
        num_alike[color] = num_alike.get(color, -1) + 1
        looks[adapter.name] = Look(color, num_alike[color] % NUM_DASHES)
    return looks


def hues_of(run: RunRecord) -> list[float]:
    """The colors of this run: degrees in OKLCH, by the number of the color."""
    num_rates = len(_rates(run))
    if num_rates < 2:
        return list(HUES[: len(run.adapters)])
    return [LOW_HUE + (HIGH_HUE - LOW_HUE) * place / (num_rates - 1) for place in range(num_rates)]


def _rates(run: RunRecord) -> list[float]:
    """The distinct learning rates of a sweep, ascending. The rates of phases are not compared."""
    if run.manifest.group.kind == "phases":
        return []
    return sorted({rate for adapter in run.adapters if (rate := _rate(adapter)) is not None})


def _rate(adapter: AdapterRecord) -> float | None:
    rate = adapter.plan.learning_rate
    return rate if rate is not None and rate > 0 else None


def adapter_curves(run: RunRecord) -> Drawings:
    looks = looks_of(run)
    last = max(run.last_step, 2)
    trained = [(adapter, _smooth_losses(adapter, last)) for adapter in run.adapters]
    evaluated = [
        (adapter, [(float(e.step), e.loss) for e in adapter.evaluations if math.isfinite(e.loss)])
        for adapter in [adapter for adapter in run.adapters if adapter.best is not None] or run.adapters
    ]
    searched = max((adapter.last_step for adapter in run.adapters if adapter.status == "dropped"), default=0)
    search = [(adapter, _smooth_losses(adapter, searched)) for adapter in run.adapters]
    charts = [
        _losses(run, looks, "Training loss while rates were dropped", search, 1, searched) if searched > 1 else None,
        _losses(run, looks, "Training loss, smoothed", trained, 1, last),
        _losses(run, looks, "Evaluation loss", evaluated, 0, last, has_dots=True),
        _over_rates(run, looks),
    ]
    small = [
        _learning_rates(run, looks, last),
        small_chart(run, "Tokens per second", lambda step: step.tokens_per_second, format_short, True, 1, last, []),
    ]
    return Drawings(
        [chart.drawn() for chart in charts if chart],
        [chart.drawn() for chart in small if chart],
    )


def _smooth_losses(adapter: AdapterRecord, last: int) -> list[Point]:
    """Up to the step `last`. All lines of a chart are smoothed equally, or they could not be compared."""
    points = [(float(s.step), s.loss) for s in adapter.steps if s.step <= last and math.isfinite(s.loss)]
    return smoothed(calmed(points), max(last / 30, 1))


Lines = Sequence[tuple[AdapterRecord, list[Point]]]


def _losses(
    run: RunRecord,
    looks: dict[str, Look],
    title: str,
    lines: Lines,
    first: int,
    last: int,
    *,
    has_dots: bool = False,
) -> Chart | None:
    lines = [(adapter, points) for adapter, points in lines if points]
    if not lines:
        return None
    values = sorted(y for _, points in lines for _, y in points)
    ticks = nice_ticks(values[0], _top(values, max(points[0][1] for _, points in lines)), 5)
    best = run.best
    dots = [
        ("end", [points[-1] for adapter, points in lines if adapter.status in ("dropped", "stopped early")]),
        ("missed", [points[-1] for adapter, points in lines if adapter.status == "diverged"]),
    ]
    marks = [
        (kind, "dot", name) for (kind, found), name in zip(dots, ("ended early", "diverged"), strict=True) if found
    ]
    marks += _cut_mark(values, ticks)
    if has_dots and len(lines) <= MANY:
        dots[:0] = [(f"{looks[adapter.name].classes} spot", points) for adapter, points in lines]
    if has_dots and best is not None and best.best is not None:
        dots.insert(0, ("best ring", [(float(best.best.step), best.best.loss)]))
        marks.insert(0, ("best", "dot", f"best {format_number(best.best.loss)}"))
    return Chart(
        title=title,
        lines=_drawn(lines, looks, best),
        first=first,
        last=last,
        format=lambda value: f"{value:g}",
        low=ticks[0],
        high=ticks[-1],
        key=[*_legend(run, lines, looks), *marks],
        dots=dots,
        hover=_hover(lines, lambda step: f"step {int(step):,}", format_number),
    )


def _top(ranked: list[float], start: float, slack: float = 1.5) -> float:
    """The top of the chart. A line that leaves the others far below does not flatten them."""
    usual = max(ranked[int(0.9 * (len(ranked) - 1))], start)
    low, top = ranked[0], ranked[-1]
    return top if top - low <= slack * (usual - low) else usual + 0.08 * (usual - low)


def _cut_mark(ranked: list[float], ticks: list[float]) -> list[tuple[str, str, str]]:
    is_cut = ranked[-1] > ticks[-1]
    return [("no-sign", "line", f"top edge: up to {format_number(ranked[-1])}")] if is_cut else []


def _drawn(lines: Lines, looks: dict[str, Look], best: AdapterRecord | None) -> list[Line]:
    """The lines with few points each, so that a page with many lines stays small. The best line is on top."""
    num_bins = max(MAX_BINS // max(len(lines), 1), 20)
    drawn = []
    for adapter, points in sorted(lines, key=lambda line: line[0] is best):
        width = " won" if adapter is best else " thin" if len(lines) > MANY else ""
        drawn.append(Line(looks[adapter.name].classes + width, [thinned(points, num_bins)]))
    return drawn


def _legend(run: RunRecord, lines: Lines, looks: dict[str, Look]) -> list[tuple[str, str, str]]:
    rates = _rates(run)
    if len(lines) > MANY and 1 < len(rates) <= MANY:
        return [(f"curve c{place}", "line", f"lr {format_rate(rate)}") for place, rate in enumerate(rates)]
    key = [(looks[adapter.name].classes, "line", adapter.name) for adapter, _ in lines[:MAX_LEGEND]]
    rest = len(lines) - MAX_LEGEND
    return [*key, *([("no-sign", "line", f"and {rest:,} more")] if rest > 0 else [])]


def _hover(lines: Lines, title: Callable[[float], str], format: Callable[[float], str]) -> list[tuple[float, str]]:
    """At each place the values of all adapters, from the lowest to the highest."""
    values = [(adapter.name, dict(points)) for adapter, points in lines]
    texts = []
    for place in spread(sorted({x for _, points in lines for x, _ in points}), MAX_STRIPS):
        found = sorted((points[place], name) for name, points in values if place in points)
        shown = [f"{format(value)}  {name[:MAX_NAME]}" for value, name in found[:MAX_HOVER]]
        more = [f"and {len(found) - MAX_HOVER:,} more"] if len(found) > MAX_HOVER else []
        texts.append((place, "\n".join([title(place), *shown, *more])))
    return texts


@dataclass(frozen=True)
class _Trend:
    """Losses over the learning rate that can be compared with each other."""

    label: str
    points: list[tuple[AdapterRecord, Point]]  # x is the logarithm of the rate


def _over_rates(run: RunRecord, looks: dict[str, Look]) -> Chart | None:
    """The loss of each adapter over its learning rate, on a log scale. A search for the learning rate evaluates only
    the winner, so the chart shows what the rates were judged by."""
    rates, best = _rates(run), run.best
    title, trends, failed = "Best evaluation loss over learning rate", _best_losses(run), _not_evaluated(run)
    if sum(len(trend.points) for trend in trends) < 2:
        title, trends, failed = "Training loss over learning rate", _losses_at_selections(run), []
    points = [point for trend in trends for point in trend.points]
    if len(rates) < 2 or not points:
        return None
    values = sorted(y for _, (_, y) in points)
    ticks = nice_ticks(values[0], _top(values, values[len(values) // 2], slack=5), 5)
    kinds = {trend.label: f"trend d{place % NUM_DASHES}" for place, trend in enumerate(trends)}
    dots = [(f"{looks[adapter.name].classes} spot", [point]) for adapter, point in points]
    dots.append(("missed", [(x, ticks[-1]) for x in failed]))
    key = [(kinds[trend.label], "line", trend.label) for trend in trends[:MAX_LEGEND] if trend.label]
    if best is not None:
        dots.insert(0, ("best ring", [point for adapter, point in points if adapter is best][-1:]))
        key.append(("best", "dot", f"best {best.name}"))
    key += [("missed", "dot", "no evaluation")] if failed else []
    ends = math.log10(rates[0]), math.log10(rates[-1])
    margin = 0.05 * (ends[1] - ends[0])
    labels = rates if len(rates) <= MAX_RATE_LABELS else spread(rates, MAX_RATE_LABELS)
    return Chart(
        title=title,
        lines=[Line(kinds[trend.label], [sorted(point for _, point in trend.points)]) for trend in trends],
        first=ends[0] - margin,
        last=ends[1] + margin,
        format=lambda value: f"{value:g}",
        low=ticks[0],
        high=ticks[-1],
        key=key + _cut_mark(values, ticks),
        dots=dots,
        hover=_hover([(a, [point]) for a, point in points], lambda x: f"learning rate {format_rate(10**x)}", _exact),
        over="learning rate",
        x_ticks=[(math.log10(rate), format_rate(rate)) for rate in labels],
    )


def _best_losses(run: RunRecord) -> list[_Trend]:
    """One trend for each rank and seed."""
    settings, found = _settings(run), dict[str, list[tuple[AdapterRecord, Point]]]()
    for adapter in run.adapters:
        rate, loss = _rate(adapter), adapter.best_loss
        if rate is not None and loss is not None and math.isfinite(loss):
            found.setdefault(settings[adapter.name], []).append((adapter, (math.log10(rate), loss)))
    return [_Trend(label, points) for label, points in found.items()]


def _not_evaluated(run: RunRecord) -> list[float]:
    rates = [_rate(adapter) for adapter in run.adapters if adapter.status == "diverged" and adapter.best_loss is None]
    return [math.log10(rate) for rate in rates if rate is not None]


def _losses_at_selections(run: RunRecord) -> list[_Trend]:
    """One trend for each step at which rates were dropped: the mean of the last half of the losses since the one
    before, which is what the trainer compares."""
    trends, start = [], 0
    for end in sorted({adapter.last_step for adapter in run.adapters if adapter.status == "dropped"}):
        points = []
        for adapter in run.adapters:
            losses = [step.loss for step in adapter.steps if start < step.step <= end]
            recent, rate = losses[len(losses) // 2 :], _rate(adapter)
            if rate is not None and adapter.last_step >= end and recent and math.isfinite(mean := fmean(recent)):
                points.append((adapter, (math.log10(rate), mean)))
        trends.append(_Trend(f"after step {end:,}", points))
        start = end
    return trends[:MANY]


def _settings(run: RunRecord) -> dict[str, str]:
    """What distinguishes adapters with the same learning rate: "rank 8, seed 1"; "" if nothing does."""
    names = [
        name for name in ("beta", "rank", "alpha", "seed") if len({getattr(a.plan, name) for a in run.adapters}) > 1
    ]
    if "rank" in names and "alpha" in names:
        names.remove("alpha")  # usually a multiple of the rank
    return {a.name: ", ".join(f"{name} {getattr(a.plan, name)}" for name in names) for a in run.adapters}


def _exact(loss: float) -> str:
    return f"{loss:.4f}"


def _learning_rates(run: RunRecord, looks: dict[str, Look], last: int) -> Chart | None:
    """The schedules, on a log scale if they differ by more than a factor of ten."""
    lines = [
        (
            adapter,
            [(float(step.step), step.learning_rate) for step in adapter.steps if 0 < step.learning_rate < math.inf],
        )
        for adapter in run.adapters
    ]
    lines = [(adapter, points) for adapter, points in lines if points]
    if not lines:
        return None
    peaks = [max(y for _, y in points) for _, points in lines]
    hover = _hover(lines, lambda step: f"step {int(step):,}", format_rate)
    is_log = max(peaks) > 10 * min(peaks)
    if is_log:
        lines = [(adapter, [(x, math.log10(y)) for x, y in points]) for adapter, points in lines]
    low, high = (math.log10(min(peaks) / 10), math.log10(max(peaks))) if is_log else (0.0, max(peaks))
    decades = [(float(power), format_rate(10.0**power)) for power in range(math.ceil(low), math.floor(high) + 1)]
    return Chart(
        title="Learning rate" + (", log scale" if is_log else ""),
        lines=_drawn(lines, looks, None),
        first=1,
        last=last,
        format=format_rate,
        low=low,
        high=high,
        hover=hover,
        small=True,
        y_ticks=spread(decades, 4) if is_log else None,
    )
