"""Plots as values, and as inline SVG: horizontal bars with intervals, and lines over an ordered axis.

Colours are CSS variables of the page around them (`measure.html`), so that plots follow its light or dark scheme.
Lengths are in pixels of the view box, which the page scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from foretoken.printing.console import visible

NUM_COLOURS = 6
_CHARACTER, _LINE, _BAR, _MARK = 6.7, 20, 11, 3.5  # of text at 12 pixels, a row, a bar, a point
_MAX_LABEL = 60  # characters; the table beside the plot has the whole text
_PLOT_WIDTH, _PLOT_HEIGHT = 420, 240
_DASHES = ("", "6 3", "2 3", "8 3 2 3")
_TICKS = 5


@dataclass(frozen=True)
class Point:
    """A value at a place of the axis, with the ends of its interval where they are known."""

    at: str
    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        if self.low is None and self.high is None:
            return shown(self.value)
        ends = ("-" if end is None else shown(end) for end in (self.low, self.high))
        return f"{shown(self.value)} [{', '.join(ends)}]"


@dataclass(frozen=True)
class Series:
    """The values of one setting."""

    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Plot:
    """Values of several settings: `bars` in a group for each place of the axis, or `lines` from place to place.

    `unit` is that of the values, `axis` says what the places are, `baseline` is a value to compare with, drawn across.
    """

    title: str
    unit: str
    series: tuple[Series, ...]
    kind: Literal["bars", "lines"] = "bars"
    axis: str = ""
    baseline: float | None = None

    @property
    def places(self) -> tuple[str, ...]:
        """The places of the axis, in the order of the series."""
        return tuple(dict.fromkeys(point.at for series in self.series for point in series.points))

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A line for each setting with its values at each place: what the plot shows, as text."""
        found = []
        for series in self.series:
            by_place = {point.at: str(point) for point in series.points}
            found.append((series.name, *(by_place.get(place, "") for place in self.places)))
        return found


def shown(value: float) -> str:
    """A value with three digits or so: what a measurement is worth."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"


def svg(plot: Plot, name: str) -> str:
    """The plot as an SVG element whose ids begin with `name`."""
    width, height, parts = _bars(plot) if plot.kind == "bars" else _lines(plot)
    what = "Bars" if plot.kind == "bars" else "Lines"
    about = f"{what} of {plot.unit}; the table beside it holds the values."
    return (
        f'<svg role="img" aria-labelledby="{name}-title {name}-about" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}">'
        f'<title id="{name}-title">{markup(plot.title)}</title><desc id="{name}-about">{markup(about)}</desc>'
        f"{''.join(parts)}</svg>"
    )


def _bars(plot: Plot) -> tuple[float, float, list[str]]:
    """Width, height and elements: for each place a heading, and under it a bar for each setting."""
    scale = _Scale(plot)
    left = max((_CHARACTER * len(_label(series.name)) for series in plot.series), default=0.0) + 10
    right = max((_CHARACTER * len(str(point)) for s in plot.series for point in s.points), default=0.0) + 16
    parts: list[str] = []
    y = float(_LINE)
    for place in plot.places:
        if len(plot.places) > 1:
            parts.append(_words(0, y, place, "heading"))
            y += _LINE
        for series in plot.series:
            for point in series.points:
                if point.at == place:
                    parts += _bar(series.name, point, left, y, scale)
                    y += _LINE
        y += _LINE / 3
    bottom = y - _LINE / 3
    grid = []
    for tick in scale.ticks:
        x = left + scale.at(tick)
        grid += [_stroke(x, _LINE / 2, x, bottom - _LINE / 2, "grid"), _words(x, bottom + 4, f"{tick:g}", "tick mid")]
    if plot.baseline is not None:
        x = left + scale.at(plot.baseline)
        grid.append(_stroke(x, _LINE / 2, x, bottom - _LINE / 2, "baseline"))
    grid.append(_words(left + _PLOT_WIDTH / 2, bottom + _LINE + 2, plot.unit, "tick mid"))
    return left + _PLOT_WIDTH + right, bottom + 2 * _LINE - 6, grid + parts


def _bar(name: str, point: Point, left: float, y: float, scale: _Scale) -> list[str]:
    zero, end = scale.at(0.0), scale.at(point.value)
    parts = [
        _words(left - 8, y, name, "end"),
        f'<rect class="bar" x="{left + min(zero, end):.1f}" y="{y - _BAR + 2:.1f}" '
        f'width="{abs(end - zero):.1f}" height="{_BAR}"/>',
        _words(left + _PLOT_WIDTH + 12, y, str(point), "value"),
    ]
    if point.low is not None or point.high is not None:
        low, high = (left + scale.at(point.value if end is None else end) for end in (point.low, point.high))
        middle = y - _BAR / 2 + 2
        parts.append(_stroke(low, middle, high, middle, "whisker"))
        known = [x for x, end in ((low, point.low), (high, point.high)) if end is not None]
        parts += [_stroke(x, middle - 3, x, middle + 3, "whisker") for x in known]
    return parts


def _lines(plot: Plot) -> tuple[float, float, list[str]]:
    """Width, height and elements: the lines with their points and intervals, and a legend beside them."""
    scale = _Scale(plot)
    left = _CHARACTER * max(len(f"{tick:g}") for tick in scale.ticks) + 14
    step = _PLOT_WIDTH / max(1, len(plot.places))
    x_of = {place: left + (number + 0.5) * step for number, place in enumerate(plot.places)}
    bottom = 1.5 * _LINE + _PLOT_HEIGHT

    def y_of(value: float) -> float:
        return bottom - scale.at(value) * _PLOT_HEIGHT / _PLOT_WIDTH

    parts = [_words(0, 12, plot.unit, "tick")]
    for tick in scale.ticks:
        y = y_of(tick)
        parts += [_stroke(left, y, left + _PLOT_WIDTH, y, "grid"), _words(left - 6, y + 4, f"{tick:g}", "tick end")]
    if plot.baseline is not None:
        y = y_of(plot.baseline)
        parts.append(_stroke(left, y, left + _PLOT_WIDTH, y, "baseline"))
    parts += [_words(x, bottom + 16, place, "tick mid") for place, x in x_of.items()]
    parts.append(_words(left + _PLOT_WIDTH / 2, bottom + 34, plot.axis, "tick mid"))
    y, legend = bottom - _PLOT_HEIGHT + 6, left + _PLOT_WIDTH + 20
    for number, series in enumerate(plot.series):
        points = [(x_of[one.at], y_of(one.value), one) for one in series.points]
        parts += _line(number, [(x, at) for x, at, _ in points])
        for x, at, one in points:
            colour, ends = number % NUM_COLOURS, [y_of(end) for end in (one.low, one.high) if end is not None]
            parts += [f'<path class="line c{colour}" d="M{x:.1f} {at:.1f}V{end:.1f}"/>' for end in ends]
        parts += _line(number, [(legend, y - 4), (legend + 28, y - 4)])
        parts.append(_words(legend + 36, y, series.name, ""))
        y += _LINE
    longest = max((len(_label(series.name)) for series in plot.series), default=0)
    return legend + 36 + _CHARACTER * longest + 8, max(bottom + 2 * _LINE, y - _LINE / 2), parts


def _line(number: int, points: Sequence[tuple[float, float]]) -> list[str]:
    """The line of the series `number` through points, with its colour, and a dash where colours come again."""
    colour, dash = number % NUM_COLOURS, _DASHES[number // NUM_COLOURS % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    marks = [f'<circle class="mark c{colour}" cx="{x:.1f}" cy="{y:.1f}" r="{_MARK}"/>' for x, y in points]
    return [f'<polyline class="line c{colour}"{dashed} points="{path}"/>', *marks]


class _Scale:
    """From 0, or the smallest value below it, to the largest end of an interval, over `_PLOT_WIDTH`."""

    def __init__(self, plot: Plot) -> None:
        ends = (end for one in plot.series for p in one.points for end in (p.value, p.low, p.high) if end is not None)
        values = [0.0, plot.baseline or 0.0, *ends]
        low, high = min(values), max(values)
        self.ticks = _ticks(low, high if high > low else low + 1.0)
        self._low, self._span = self.ticks[0], self.ticks[-1] - self.ticks[0]

    def at(self, value: float) -> float:
        return _PLOT_WIDTH * (value - self._low) / self._span


def _ticks(low: float, high: float) -> list[float]:
    """About `_TICKS` round numbers, the first at most `low`, the last at least `high`."""
    raw = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _stroke(x: float, y: float, to_x: float, to_y: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"/>'


def _words(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{markup(_label(text))}</text>'


def _label(text: str) -> str:
    return text if len(text) <= _MAX_LABEL else text[: _MAX_LABEL - 1] + "…"


def markup(text: str) -> str:
    """A text as it stands in a page."""
    return escape(visible(text))
