"""Charts without scripts: lines stretch with the page, text does not, and hovering shows values.

The SVG contains only lines and is stretched to the available width. Axis labels and hover values are HTML on top of it.
Here their places are computed; `templates/chart.html` has the markup. Long runs are thinned in bins. Every bin keeps
its minimum and maximum, so no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

WIDTH, HEIGHT = 1000, 300  # in SVG units
MAX_BINS = 400  # of a line, with up to four points each
MAX_STRIPS = 160  # vertical strips that show values on hover
MAX_MARKS = 150

Point = tuple[float, float]
T = TypeVar("T")


@dataclass(frozen=True)
class Line:
    """Connected stretches of points in one style."""

    kind: str  # CSS class
    stretches: list[list[Point]]


@dataclass(frozen=True)
class Label:
    """A text at a place of the plot."""

    kind: str  # CSS class
    place: str  # CSS
    text: str


@dataclass(frozen=True)
class Drawing:
    """What `templates/chart.html` needs."""

    title: str
    over: str
    is_small: bool
    key: list[tuple[str, str, str]]
    paths: list[tuple[str, str]]  # CSS class, and the commands of an SVG path
    labels: list[Label]
    strips: list[Label]  # that show their text on hover


@dataclass(frozen=True)
class Drawings:
    large: list[Drawing]
    small: list[Drawing]

    def __bool__(self) -> bool:
        return bool(self.large or self.small)


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

    def drawn(self) -> Drawing:
        ticks = self.y_ticks
        if ticks is None:
            ticks = [(tick, self.format(tick)) for tick in nice_ticks(self.low, self.high, 3 if self.small else 5)]
            self.low, self.high = min(self.low, ticks[0][0]), max(self.high, ticks[-1][0])
        inner = [step for step, _ in self.borders if self.first < step < self.last]
        paths = [("grid", "".join(f"M0 {self._y(tick)}H{WIDTH}" for tick, _ in ticks))]
        paths += [("border", f"M{self._x(step)} 0V{HEIGHT}") for step in inner]
        paths += [(line.kind, self._path(line)) for line in self.lines if line.stretches]
        paths += [(kind, self._dots(points)) for kind, points in self.dots if points]
        labels = [Label("y", f"top:{_percent(self._y(tick), HEIGHT)}", label) for tick, label in ticks]
        labels += self._steps() + ([] if self.small else self._stages())
        return Drawing(self.title, self.over, self.small, self.key, paths, labels, self._strips())

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
        return "".join(parts)

    def _dots(self, points: Sequence[Point]) -> str:
        # A line of zero length with round caps: the only circle that stays round when the SVG is stretched.
        return "".join(f"M{self._x(x)} {self._y(y)}h0" for x, y in spread(points, MAX_MARKS))

    def _steps(self) -> list[Label]:
        ticks = self.x_ticks
        if ticks is None:
            round_ones = [t for t in nice_ticks(self.first, self.last, 3 if self.small else 5) if t == int(t)]
            inside = [tick for tick in round_ones if self.first <= tick <= self.last]
            ticks = [(tick, f"{int(tick):,}") for tick in inside or [self.last]]
        places = [(float(self._x(tick)) / WIDTH, label) for tick, label in ticks]
        return [Label("x end" if at > 0.97 else "x", f"left:{at:.2%}", label) for at, label in places]

    def _stages(self) -> list[Label]:
        starts = self.borders
        if len(starts) < 2:
            return []
        ends = [*(step for step, _ in starts[1:]), self.last]
        labels = []
        for (start, name), end in zip(starts, ends, strict=True):
            left, right = float(self._x(start)), float(self._x(end))
            if right > left:
                labels.append(Label("stage", _span(left, right), name))
        return labels

    def _strips(self) -> list[Label]:
        points = self.hover
        strips = []
        for place, (step, words) in enumerate(points):
            before = points[place - 1][0] if place else 2 * step - (points[1][0] if len(points) > 1 else step - 2)
            after = points[place + 1][0] if place + 1 < len(points) else 2 * step - before
            left, right = float(self._x((before + step) / 2)), float(self._x((step + after) / 2))
            strips.append(Label("turned" if left > WIDTH / 2 else "", _span(left, right), words))
        return strips


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
    """Running median of five: removes single spikes, which the faint line of raw values still shows. Near the ends of
    fewer points, so that the first and the last stay what they are."""
    values = [y for _, y in points]
    reach = [min(2, place, len(values) - 1 - place) for place in range(len(values))]
    return [
        (x, sorted(values[place - most : place + most + 1])[most])
        for place, ((x, _), most) in enumerate(zip(points, reach, strict=True))
    ]


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


def _span(left: float, right: float) -> str:
    return f"left:{_percent(left, WIDTH)};width:{_percent(right - left, WIDTH)}"


def _percent(part: float | str, whole: float) -> str:
    return f"{float(part) / whole:.2%}"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
