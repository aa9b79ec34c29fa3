"""The report's picture of who did what when, drawn as one lane a role over the same seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from miles.observe.charts import BOX, nice_ticks
from miles.observe.rows import Row
from miles.observe.text import duration, number, printable
from miles.observe.timeline import WAITING, Span, Timeline, levels, timeline_of

LAST_STEPS = 24
MOST_LANES = 16
TONES = {WAITING: 0, "score": 3, "update": 1, "publish": 2, "eval": 4, "checkpoint": 6}
NAMES = {WAITING: "waits for groups"}
HINT = (
    "The learner waits until its step's groups are there; where no other process collects, it collects in that time. "
    "A collector's lane is as high as the groups it has under way; where it is empty it waits for credit "
    "(buffer.max_staleness). Learner and buffer each go by their own clock."
)


def timeline_html(rows: Sequence[Row]) -> str:
    """The picture over the last steps and the waits over all of them; empty where nothing was measured."""
    shown, whole = timeline_of(rows, LAST_STEPS), timeline_of(rows)
    if shown is None or whole is None:
        return '<p class="empty">Nothing of this was measured yet.</p>'
    first, last = shown.steps
    return (
        f'<div class="wide"><figure class="chart lanes"><figcaption><h3>Steps {first} to {last}</h3>'
        f'<p class="hint">{escape(HINT)}</p>{_legend(shown)}</figcaption>{_lanes(shown)}{_axis(shown)}</figure></div>'
        f"{_waits(whole)}"
    )


def _lanes(shown: Timeline) -> str:
    left, right = shown.window
    ready = shown.ready
    lanes = [("learner", _spans(shown.learner, left, right))]
    if ready:
        lanes.append((f"ready groups, at most {max(level for _, level in ready)}", _area(ready, left, right, 5)))
    workers = list(shown.collectors.items())
    for worker, groups in workers[:MOST_LANES]:
        under_way = levels((group.start, group.end) for group in groups)
        most = max((level for _, level in under_way), default=0)
        lanes.append((f"{worker}, at most {most} at once", _area(under_way, left, right, 7)))
    drawn = "".join(f'<div class="lane"><span>{escape(printable(name))}</span>{svg}</div>' for name, svg in lanes)
    hidden = len(workers) - MOST_LANES
    return drawn + (f'<p class="hint">and {hidden} more collectors</p>' if hidden > 0 else "")


def _spans(spans: Iterable[Span], left: float, right: float) -> str:
    out = []
    for span in spans:
        start, end = _x(span.start, left, right), _x(span.end, left, right)
        name = NAMES.get(span.name, span.name)
        said = escape(printable(f"step {span.step}: {name}, {duration(span.end - span.start)}"))
        tone = TONES.get(span.name, 0)
        out.append(
            f'<path class="area t{tone}" d="M{start:.1f} 0H{end:.1f}V{BOX}H{start:.1f}Z"><title>{said}</title></path>'
        )
    return _svg("".join(out))


def _area(steps: Sequence[tuple[float, int]], left: float, right: float, tone: int) -> str:
    """A staircase over the window, the highest step as high as the lane."""
    top = max((level for _, level in steps), default=0) or 1
    level, path = 0, f"M0 {BOX}"
    for time, following in steps:
        if time > left:
            x = _x(time, left, right)
            path += f"H{x:.1f}"
        level = following
        path += f"V{BOX - level / top * BOX:.1f}"
        if time >= right:
            break
    return _svg(f'<path class="area t{tone}" d="{path}H{BOX}V{BOX}Z"/>')


def _svg(drawing: str) -> str:
    return f'<svg viewBox="0 0 {BOX} {BOX}" preserveAspectRatio="none" role="img">{drawing}</svg>'


def _x(time: float, left: float, right: float) -> float:
    return min(max((time - left) / max(right - left, 1e-9), 0.0), 1.0) * BOX


def _axis(shown: Timeline) -> str:
    left, right = shown.window
    length = max(right - left, 1e-9)
    ticks = [tick for tick in nice_ticks(0.0, length, 8) if tick <= length]
    labels = "".join(f'<span style="left:{tick / length * 100:.2f}%">{escape(number(tick))}</span>' for tick in ticks)
    return f'<div class="lane"><span>seconds</span><div class="xaxis">{labels}</div></div>'


def _legend(shown: Timeline) -> str:
    there = {span.name for span in shown.learner}
    keys = "".join(
        f'<li><i class="key t{tone}"></i>{escape(NAMES.get(name, name))}</li>'
        for name, tone in TONES.items()
        if name in there
    )
    return f'<ul class="legend">{keys}</ul>'


def _waits(whole: Timeline) -> str:
    rows = "".join(
        f'<tr><td>{escape(printable(wait.role))}</td><td class="n">{escape(duration(wait.seconds))}</td>'
        f'<td class="n">{wait.share:.0%}</td></tr>'
        for wait in whole.waits()
    )
    head = '<tr><th>waited for another</th><th class="n">time</th><th class="n">share of the run</th></tr>'
    return f'<div class="wide scroll"><table>{head}{rows}</table></div>'
