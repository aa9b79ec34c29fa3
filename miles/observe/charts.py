"""Charts as HTML and inline SVG: lines, points with error bars and stacked columns, sized by the page and not by us.

The drawing is stretched to its frame; labels are HTML at percentages beside it, so text keeps its size on any screen.
Values for the pointer stand as JSON in the chart's `data-chart` attribute.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import pairwise
from math import ceil, floor, isclose, log10

from miles.observe.text import number, printable

Point = tuple[float, float]

BOX = 1000  # units of the stretched drawing, each way
TINY = 1e-290  # a span below this is none: its parts would not be numbers
NEAR = 1e-4  # values closer together than this are drawn as a flat line: their labels would all be the same
MAX_POINTS = 800
CALM_FROM = 100  # points from which a noisy curve is smoothed


@dataclass(frozen=True)
class Series:
    """One curve. `tone` is its colour, 1 to 7, or 0 for grey; `errors` are half-heights of bars, one a point."""

    label: str
    points: Sequence[Point]
    tone: int = 1
    marker: str = ""  # "", "round" or "square"
    dashed: bool = False
    faint: bool = False  # drawn behind, for the raw curve under a smooth one
    errors: Sequence[float] | None = None
    light: bool = False  # the line only leads the eye from marker to marker


@dataclass(frozen=True)
class Chart:
    """What one chart shows. `limits` are horizontal lines with a meaning; `low` and `high` are included in the y axis."""

    title: str
    unit: str
    series: Sequence[Series]
    hint: str = ""
    x_label: str = "step"
    stacked: bool = False
    large: bool = False
    low: float | None = None
    high: float | None = None
    limits: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Scale:
    """Maps values to the drawing and to percentages. `top` is the y value at the upper edge."""

    left: float
    right: float
    bottom: float
    top: float

    def x(self, value: float) -> float:
        return (value - self.left) / (self.right - self.left) * BOX

    def y(self, value: float) -> float:
        return (self.top - value) / (self.top - self.bottom) * BOX


def chart_html(chart: Chart) -> str:
    """The chart as a <figure>; an empty string when no series has a point."""
    series = [thinned(line, chart.stacked) for line in chart.series if line.points]
    if not series:
        return ""
    scale, y_ticks = _scale(chart, series)
    x_ticks = [tick for tick in nice_ticks(scale.left, scale.right, 8, whole=True) if scale.left <= tick <= scale.right]
    drawing = _stack(series, scale) if chart.stacked else "".join(_curve(line, scale) for line in series)
    return (
        f'<figure class="chart{" large" if chart.large else ""}">'
        f"<figcaption><h3>{escape(chart.title)}</h3>{_hint(chart.hint)}{_legend(series)}</figcaption>"
        f'<div class="unit">{escape(chart.unit)}</div><div class="frame"><div class="yaxis">{_y_labels(y_ticks, scale)}</div>'
        f'<div class="plot" data-chart="{escape(_values(chart, series, scale))}">'
        f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" role="img" aria-label="{escape(_spoken(chart, series))}">'
        f"{_grid(y_ticks, scale)}{_limits(chart, scale)}{drawing}</svg></div>"
        f'<div class="xname">{escape(chart.x_label)}</div><div class="xaxis">{_x_labels(x_ticks, scale)}</div></div></figure>'
    )


def sparkline_svg(points: Sequence[Point]) -> str:
    """A small curve without axes, for a table."""
    line = thinned(Series("", points), False, limit=120)
    if len(line.points) < 2:
        return ""
    values = [y for _, y in line.points]
    low, high = min(values), max(values)
    scale = Scale(line.points[0][0], line.points[-1][0], low, high if high > low else low + max(1.0, abs(low)))
    path = _path(line.points, scale)
    return (
        f'<svg class="spark" viewBox="0 -60 {BOX} {BOX + 120}" preserveAspectRatio="none" aria-hidden="true">'
        f'<path class="line t1" d="{path}"/></svg>'
    )


def nice_ticks(low: float, high: float, count: int, whole: bool = False) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that span [low, high], about `count` of them."""
    span = high - low
    if span <= TINY:
        return [low]
    rough = span / count
    power = 10 ** floor(log10(rough))
    step = next((factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999), 10 * power)
    if whole:
        step = max(float(ceil(step)), 1.0)
    return [round(i * step, 12) for i in range(floor(low / step + 1e-9), ceil(high / step - 1e-9) + 1)]


def smooth(points: Sequence[Point], span: float) -> list[Point]:
    """Exponential average over about `span` points to either side, so that the curve does not lag behind its points."""
    values = [y for _, y in points]
    before = _averaged(values, span)
    after = _averaged(values[::-1], span)[::-1]
    return [(x, (left + right) / 2) for (x, _), left, right in zip(points, before, after, strict=True)]


def _averaged(values: Sequence[float], span: float) -> list[float]:
    keep = 1 - 2 / (span + 1)
    total = weight = 0.0
    out = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        out.append(total / weight)
    return out


def calmed(chart: Chart, points: int = CALM_FROM) -> Chart:
    """The chart with each long and noisy curve smoothed, and the measured one kept faint behind it."""
    if chart.stacked:
        return chart
    lines = []
    for line in chart.series:
        if len(line.points) >= points and _noisy(line.points):
            lines.append(replace(line, label=f"{line.label}, each step", faint=True))
            lines.append(replace(line, points=smooth(line.points, max(len(line.points) / 25, 5))))
        else:
            lines.append(line)
    return replace(chart, series=lines)


def _noisy(points: Sequence[Point]) -> bool:
    """Whether the curve goes up and down so much that its path is several times its range."""
    values = [y for _, y in points]
    return sum(abs(after - before) for before, after in pairwise(values)) > 4 * (max(values) - min(values)) > 0


def thinned(line: Series, stacked: bool, limit: int = MAX_POINTS) -> Series:
    """At most about `limit` points: of each stretch the lowest and the highest, so that no spike is lost."""
    points = line.points
    if len(points) <= limit:
        return line
    if stacked:
        size = ceil(len(points) / limit)
        kept = list(points[::size])
    else:
        size = ceil(len(points) / (limit // 2))
        stretches = [points[i : i + size] for i in range(0, len(points), size)]
        ends = [{min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])} for part in stretches]
        kept = [point for pair in ends for point in sorted(pair)]
    return replace(line, points=kept, errors=None)


def _scale(chart: Chart, series: Sequence[Series]) -> tuple[Scale, list[float]]:
    places = [x for line in series for x, _ in line.points]
    if chart.stacked:
        values = [0.0, *_totals(series).values()]
    else:
        values = [y for line in series for _, y in line.points]
        values += [y + e for line in series if line.errors for (_, y), e in zip(line.points, line.errors, strict=True)]
    values += [edge for edge in (chart.low, chart.high) if edge is not None]
    low, high = min(values), max(values)
    if isclose(low, high, rel_tol=NEAR, abs_tol=TINY):
        apart = abs(high) * 0.1 or 1.0
        low, high = (0.0, high + apart) if low >= 0 and apart >= high else (low - apart, high + apart)
    ticks = nice_ticks(low, high, 5 if chart.large else 4)
    pad = 0.5 if chart.stacked or min(places) == max(places) else 0.0
    return Scale(min(places) - pad, max(places) + pad, min(ticks[0], low), max(ticks[-1], high)), ticks


def _totals(series: Sequence[Series]) -> dict[float, float]:
    totals: dict[float, float] = {}
    for line in series:
        for x, y in line.points:
            totals[x] = totals.get(x, 0.0) + y
    return totals


def _curve(line: Series, scale: Scale) -> str:
    tone = f"t{line.tone}{' faint' if line.faint else ''}"
    out = []
    if line.errors:
        bars = zip(line.points, line.errors, strict=True)
        path = "".join(f"M{scale.x(x):.1f} {scale.y(y - e):.1f}V{scale.y(y + e):.1f}" for (x, y), e in bars)
        out.append(f'<path class="error {tone}" d="{path}"/>')
    if len(line.points) > 1:
        look = f"{' dashed' if line.dashed else ''}{' light' if line.light else ''}"
        out.append(f'<path class="line {tone}{look}" d="{_path(line.points, scale)}"/>')
    marker = line.marker or ("round" if len(line.points) == 1 else "")
    if marker:
        # A line of no length with round or square ends: the stretched drawing cannot distort it.
        path = "".join(f"M{scale.x(x):.1f} {scale.y(y):.1f}h.01" for x, y in line.points)
        out.append(f'<path class="mark {marker} {tone}" d="{path}"/>')
    return "".join(out)


def _path(points: Sequence[Point], scale: Scale) -> str:
    return "M" + "L".join(f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in points)


def _stack(series: Sequence[Series], scale: Scale) -> str:
    places = sorted({x for line in series for x, _ in line.points})
    apart = min((after - before for before, after in pairwise(places)), default=1.0)
    half = apart * (0.42 if len(places) <= 80 else 0.5)
    base = dict.fromkeys(places, 0.0)
    out = []
    for line in series:
        path = ""
        for x, y in line.points:
            if y:
                left, right = scale.x(x - half), scale.x(x + half)
                path += f"M{left:.1f} {scale.y(base[x]):.1f}H{right:.1f}V{scale.y(base[x] + y):.1f}H{left:.1f}Z"
                base[x] += y
        out.append(f'<path class="area t{line.tone}" d="{path}"/>')
    return "".join(out)


def _grid(ticks: Sequence[float], scale: Scale) -> str:
    path = "".join(f"M0 {scale.y(tick):.1f}H{BOX}" for tick in ticks)
    return f'<path class="rule" d="{path}"/>'


def _limits(chart: Chart, scale: Scale) -> str:
    seen = [(value, label) for value, label in chart.limits if scale.bottom <= value <= scale.top]
    return "".join(
        f'<path class="limit" d="M0 {scale.y(value):.1f}H{BOX}"><title>{escape(label)}</title></path>'
        for value, label in seen
    )


def _y_labels(ticks: Sequence[float], scale: Scale) -> str:
    return "".join(f'<span style="top:{scale.y(tick) / 10:.2f}%">{escape(number(tick))}</span>' for tick in ticks)


def _x_labels(ticks: Sequence[float], scale: Scale) -> str:
    return "".join(f'<span style="left:{scale.x(tick) / 10:.2f}%">{tick:.0f}</span>' for tick in ticks)


def _hint(text: str) -> str:
    return f'<p class="hint">{escape(text)}</p>' if text else ""


def _legend(series: Sequence[Series]) -> str:
    named = [line for line in series if not line.faint]
    if len(named) < 2:
        return ""
    keys = "".join(
        f'<li><i class="key t{line.tone}{" dashed" if line.dashed else ""}"></i>{escape(printable(line.label))}</li>'
        for line in named
    )
    return f'<ul class="legend">{keys}</ul>'


def _spoken(chart: Chart, series: Sequence[Series]) -> str:
    parts = [
        f"{printable(line.label)} from {number(line.points[0][1])} to {number(line.points[-1][1])}"
        for line in series
        if not line.faint
    ]
    return f"{chart.title}, {chart.unit}, by {chart.x_label}: {'; '.join(parts)}"


def _values(chart: Chart, series: Sequence[Series], scale: Scale) -> str:
    """JSON for the pointer: x places, and for each series its label, tone and values at those places."""
    places = sorted({x for line in series for x, _ in line.points})
    lines = []
    for line in series:
        at = dict(line.points)
        values = [float(f"{at[x]:.5g}") if x in at else None for x in places]
        lines.append({"label": printable(line.label), "tone": line.tone, "y": values})
    span = [round(scale.left, 3), round(scale.right, 3)]
    return json.dumps({"name": chart.x_label, "span": span, "x": places, "lines": lines}, separators=(",", ":"))
