"""Charts as SVG and HTML without scripts: lines stretch with the page, text does not, and hovering shows values.

The SVG contains only lines and is stretched to the available width. Axis labels and hover values are HTML on top of it.
Long runs are thinned in bins. Every bin keeps its minimum and maximum, so no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trillora.report.html import text

WIDTH, HEIGHT = 1000, 300  # in SVG units
MAX_BINS = 400  # of a line, with up to four points each
MAX_STRIPS = 160  # vertical strips that show values on hover
MAX_MARKS = 150

Point = tuple[float, float]
T = TypeVar("T")

STYLE = """
.chart { margin: 0; min-width: 0; }
.chart figcaption { display: flex; flex-wrap: wrap; gap: .1rem 1.1rem; align-items: baseline; font-weight: 600; }
.chart figcaption span { font-weight: 400; font-size: .85rem; color: var(--faint); white-space: nowrap; }
.chart figcaption i { display: inline-block; width: 1.1rem; height: 0; border-top: 3px solid; border-radius: 2px;
  vertical-align: middle; margin-right: .35rem; }
.chart figcaption i.dot { width: .6rem; height: .6rem; border: 0; border-radius: 50%; background: currentColor; }
.plot { position: relative; height: 17rem; margin: 1.5rem .4rem 1.9rem 2.9rem; }
.small .plot { height: 9rem; margin-top: .9rem; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.plot path { fill: none; vector-effect: non-scaling-stroke; stroke-linejoin: round; stroke-linecap: round;
  stroke: currentColor; }
.plot .grid { stroke: var(--line); stroke-width: 1; stroke-linecap: butt; }
.plot .border { stroke: var(--faint); stroke-width: 1; stroke-dasharray: 3 4; stroke-linecap: butt; }
.raw { color: var(--masked); } figcaption .raw { opacity: .4; } .plot .raw { stroke-width: 1; opacity: .38; }
.smooth { color: var(--masked); } .plot .smooth { stroke-width: 2.5; } .small .plot .smooth { stroke-width: 1.7; }
.evaluation { color: var(--trained); } .plot .evaluation { stroke-width: 2; }
.plot .evaluation.dots { stroke-width: 8; }
.best { color: var(--edge); } .plot .best.ring { stroke-width: 14; opacity: .9; }
.missed { color: var(--bad); } .plot .missed { stroke-width: 7; }
.cut { color: var(--masked); } .plot .cut { stroke-width: 6; }
.plot > span { position: absolute; font-size: .75rem; line-height: 1; color: var(--faint); white-space: nowrap;
  font-variant-numeric: tabular-nums; }
.plot > .y { right: 100%; margin-right: .55rem; transform: translateY(-50%); }
.plot > .x { top: 100%; margin-top: .5rem; transform: translateX(-50%); }
.plot > .x.end { transform: translateX(-100%); }
.plot > .stage { bottom: 100%; margin-bottom: .2rem; padding: 0 .3rem 2px 0; overflow: hidden;
  text-overflow: ellipsis; }
.plot > i { position: absolute; top: 0; bottom: 0; font-style: normal; }
.plot > i:hover { background: linear-gradient(var(--faint), var(--faint)) center / 1px 100% no-repeat; }
.plot > i b { display: none; position: absolute; top: .4rem; left: calc(50% + .5rem); z-index: 2; padding: .4rem .6rem;
  border-radius: 7px; background: var(--text); color: var(--card); font-weight: 400; font-size: .78rem;
  line-height: 1.45; white-space: pre; pointer-events: none; }
.plot > i.turned b { left: auto; right: calc(50% + .5rem); }
.plot > i:hover b { display: block; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem 1.5rem;
  padding-top: .9rem; }
"""


@dataclass(frozen=True)
class Line:
    """Connected stretches of points in one style."""

    kind: str  # CSS class
    stretches: list[list[Point]]


@dataclass
class Chart:
    title: str
    lines: list[Line]
    first: float  # step at the left edge
    last: float
    format: Callable[[float], str]  # of values on the y axis
    low: float
    high: float  # values above are clipped and marked
    key: list[tuple[str, str, str]] = field(default_factory=list)  # CSS class, "line" or "dot", label
    dots: list[tuple[str, list[Point]]] = field(default_factory=list)  # CSS class and points
    borders: list[tuple[float, str]] = field(default_factory=list)  # first x of each stage, and its name
    hover: list[tuple[float, str]] = field(default_factory=list)  # step and text, ascending
    small: bool = False
    over: str = "steps"
    x_ticks: list[tuple[float, str]] | None = None  # place and label, where round numbers do not fit: a log scale
    y_ticks: list[tuple[float, str]] | None = None

    def html(self) -> str:
        ticks = self.y_ticks
        if ticks is None:
            ticks = [(tick, self.format(tick)) for tick in nice_ticks(self.low, self.high, 3 if self.small else 5)]
            self.low, self.high = min(self.low, ticks[0][0]), max(self.high, ticks[-1][0])
        grid = "".join(f"M0 {self._y(tick)}H{WIDTH}" for tick, _ in ticks)
        shapes = [f'<path class="grid" d="{grid}"/>']
        inner = [(step, name) for step, name in self.borders if self.first < step < self.last]
        shapes += [f'<path class="border" d="M{self._x(step)} 0V{HEIGHT}"/>' for step, _ in inner]
        shapes += [self._path(line) for line in self.lines]
        shapes += [f'<path class="{kind}" d="{self._dots(points)}"/>' for kind, points in self.dots if points]
        labels = [f'<span class="y" style="top:{_percent(self._y(t), HEIGHT)}">{label}</span>' for t, label in ticks]
        labels += self._steps() + ([] if self.small else self._stages())
        class_name = "chart small" if self.small else "chart"
        return (
            f'<figure class="{class_name}"><figcaption>{text(self.title)}{self._key()}</figcaption>'
            f'<div class="plot"><svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" '
            f'aria-label="{text(self.title)} over {self.over}">{"".join(shapes)}</svg>'
            f"{''.join(labels)}{self._strips()}</div></figure>"
        )

    def _x(self, step: float) -> str:
        share = (step - self.first) / ((self.last - self.first) or 1)
        return _short(WIDTH * min(max(share, 0), 1))

    def _y(self, value: float) -> str:
        share = (value - self.low) / ((self.high - self.low) or 1)
        return _short(HEIGHT * (1 - min(max(share, 0), 1)))

    def _path(self, line: Line) -> str:
        parts = []
        for stretch in line.stretches:
            points = thinned(stretch)
            parts.append("M" + "L".join(f"{self._x(x)} {self._y(y)}" for x, y in points))
            if len(points) == 1:
                parts.append("h0")
        return f'<path class="{line.kind}" d="{"".join(parts)}"/>' if parts else ""

    def _dots(self, points: Sequence[Point]) -> str:
        # A line of zero length with round caps: the only circle that stays round when the SVG is stretched.
        return "".join(f"M{self._x(x)} {self._y(y)}h0" for x, y in spread(points, MAX_MARKS))

    def _key(self) -> str:
        return "".join(
            f'<span><i class="{kind}{" dot" if shape == "dot" else ""}"></i>{text(name)}</span>'
            for kind, shape, name in self.key
        )

    def _steps(self) -> list[str]:
        ticks = self.x_ticks
        if ticks is None:
            round_ones = [t for t in nice_ticks(self.first, self.last, 3 if self.small else 5) if t == int(t)]
            inside = [tick for tick in round_ones if self.first <= tick <= self.last]
            ticks = [(tick, f"{int(tick):,}") for tick in inside or [self.last]]
        labels = []
        for tick, label in ticks:
            at = float(self._x(tick)) / WIDTH
            edge = " end" if at > 0.97 else ""
            labels.append(f'<span class="x{edge}" style="left:{at:.2%}">{label}</span>')
        return labels

    def _stages(self) -> list[str]:
        starts = self.borders
        if len(starts) < 2:
            return []
        ends = [*(step for step, _ in starts[1:]), self.last]
        labels = []
        for (start, name), end in zip(starts, ends, strict=True):
            left, right = float(self._x(start)), float(self._x(end))
            if right > left:
                place = f"left:{_percent(left, WIDTH)};width:{_percent(right - left, WIDTH)}"
                labels.append(f'<span class="stage" style="{place}">{text(name)}</span>')
        return labels

    def _strips(self) -> str:
        points = self.hover
        strips = []
        for place, (step, words) in enumerate(points):
            before = points[place - 1][0] if place else 2 * step - (points[1][0] if len(points) > 1 else step - 2)
            after = points[place + 1][0] if place + 1 < len(points) else 2 * step - before
            left, right = float(self._x((before + step) / 2)), float(self._x((step + after) / 2))
            turned = ' class="turned"' if left > WIDTH / 2 else ""
            place_on = f"left:{_percent(left, WIDTH)};width:{_percent(right - left, WIDTH)}"
            strips.append(f'<i{turned} style="{place_on}"><b>{text(words)}</b></i>')
        return "".join(strips)


def thinned(points: Sequence[Point], max_bins: int = MAX_BINS) -> list[Point]:
    """At most four points per bin, in order: the first, the minimum, the maximum and the last."""
    if len(points) <= 4 * max_bins:
        return list(points)
    kept: list[Point] = []
    for number in range(max_bins):
        start, end = len(points) * number // max_bins, len(points) * (number + 1) // max_bins
        by_value = sorted(range(start, end), key=lambda index: points[index][1])
        kept += [points[index] for index in sorted({start, by_value[0], by_value[-1], end - 1})]
    return kept


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[round(number * (len(items) - 1) / (most - 1))] for number in range(most)]


def calmed(points: Sequence[Point]) -> list[Point]:
    """Running median of five: removes single spikes, which the faint line of raw values still shows."""
    values = [y for _, y in points]
    around = (sorted(values[max(place - 2, 0) : place + 3]) for place in range(len(values)))
    return [(x, near[len(near) // 2]) for (x, _), near in zip(points, around, strict=True)]


def smoothed(points: Sequence[Point], width: float) -> list[Point]:
    """Exponential moving average: a point's weight falls to 1/e after `width` points. No bias at the start."""
    keep, total, weight, means = math.exp(-1 / width), 0.0, 0.0, []
    for x, y in points:
        total, weight = keep * total + y, keep * weight + 1
        means.append((x, total / weight))
    return means


def nice_ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers that cover low to high."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low, low + 1]
    unit = 10 ** math.floor(math.log10(span / about))
    step = next(unit * n for n in (1, 2, 2.5, 5, 10, 20) if span / (unit * n) <= about + 0.5)
    first = math.floor(low / step + 1e-9)
    count = math.ceil(high / step - 1e-9) - first
    return [round((first + number) * step, 12) for number in range(count + 1)]


def _percent(part: float | str, whole: float) -> str:
    return f"{float(part) / whole:.2%}"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
