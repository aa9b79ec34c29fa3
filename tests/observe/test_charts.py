"""Where the charts put their points, and what they keep of long curves."""

from __future__ import annotations

import html
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.observe.charts import Chart, Series, calmed, chart_html, nice_ticks, smooth, sparkline_svg, thinned


def paths(page: str, name: str) -> list[str]:
    return re.findall(rf'<path class="{name}[^"]*" d="([^"]*)"', page)


def values(page: str) -> dict[str, Any]:
    match = re.search(r'data-chart="([^"]*)"', page)
    assert match is not None
    return json.loads(html.unescape(match[1]))


@pytest.mark.parametrize(
    ("span", "count", "ticks"),
    [
        ((0.0, 1.0), 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        ((0.03, 0.97), 4, [0, 0.25, 0.5, 0.75, 1.0]),
        ((-3.0, 7.0), 4, [-5, -2.5, 0, 2.5, 5, 7.5]),
        ((1e-6, 9e-6), 4, [0, 2e-6, 4e-6, 6e-6, 8e-6, 1e-5]),
        ((5.0, 5.0), 4, [5.0]),
    ],
)
def test_ticks_are_round_and_span_the_values(span: tuple[float, float], count: int, ticks: list[float]) -> None:
    assert nice_ticks(*span, count) == pytest.approx(ticks)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9), st.integers(2, 10))
def test_ticks_cover_every_span_and_stay_few(low: float, span: float, count: int) -> None:
    high = low + span
    ticks = nice_ticks(low, high, count)
    assert len(ticks) <= count + 3
    if high > low and span > abs(low) * 1e-9:
        slack = span * 1e-6
        assert ticks[0] <= low + slack
        assert ticks[-1] >= high - slack


@given(
    st.lists(
        st.tuples(st.integers(0, 10**6), st.floats(-1e290, 1e290)), min_size=1, max_size=6, unique_by=lambda p: p[0]
    ),
    st.booleans(),
)
def test_any_numbers_make_a_drawing_without_nan(points: list[tuple[float, float]], stacked: bool) -> None:
    line = Series("a", sorted((x, abs(y) if stacked else y) for x, y in points))
    page = chart_html(calmed(Chart("C", "u", [line], stacked=stacked), points=3)) + sparkline_svg(line.points)
    assert not re.search(r"\b(nan|inf)\b", page, flags=re.IGNORECASE)


def test_steps_are_counted_in_whole_numbers() -> None:
    assert nice_ticks(1, 3, 8, whole=True) == [1, 2, 3]


def test_a_line_runs_through_its_points_in_the_stretched_box() -> None:
    page = chart_html(Chart("Reward", "mean", [Series("a", [(0, 0.0), (5, 1.0), (10, 0.5)])]))
    assert paths(page, "line t1") == ["M0.0 1000.0L500.0 0.0L1000.0 500.0"]
    assert values(page) == {
        "name": "step",
        "span": [0, 10],
        "x": [0, 5, 10],
        "lines": [{"label": "a", "tone": 1, "y": [0.0, 1.0, 0.5]}],
    }


def test_points_of_other_places_leave_gaps_and_no_zeros() -> None:
    page = chart_html(Chart("R", "u", [Series("a", [(0, 1.0), (2, 1.0)]), Series("b", [(1, 0.5)])]))
    assert [line["y"] for line in values(page)["lines"]] == [[1.0, None, 1.0], [None, 0.5, None]]
    assert paths(page, "mark round t1") == ["M500.0 833.3h.01"]  # a single point is a mark; the axis goes from 0.4 to 1


def test_error_bars_reach_one_error_to_both_sides() -> None:
    page = chart_html(Chart("R", "u", [Series("a", [(0, 0.5), (1, 0.5)], errors=[0.5, 0.25])], low=0.0, high=1.0))
    assert paths(page, "error t1") == ["M0.0 1000.0V0.0M1000.0 750.0V250.0"]


def test_columns_stand_on_each_other() -> None:
    chart = Chart("T", "s", [Series("a", [(1, 2.0), (2, 1.0)]), Series("b", [(1, 2.0), (2, 0.0)], 2)], stacked=True)
    page = chart_html(chart)
    assert paths(page, "area t2") == ["M40.0 500.0H460.0V0.0H40.0Z"]
    assert paths(page, "area t1") == ["M40.0 1000.0H460.0V500.0H40.0ZM540.0 1000.0H960.0V750.0H540.0Z"]


@pytest.mark.parametrize("value", [0.0, 1.0, -2.0, 1e-9, 1e9])
def test_a_constant_curve_has_an_axis(value: float) -> None:
    page = chart_html(Chart("C", "u", [Series("a", [(1, value), (2, value)])]))
    assert "nan" not in page
    assert page.count("<span style=") >= 4
    (path,) = paths(page, "line t1")
    heights = {float(y) for y in re.findall(r" (-?[\d.]+)", path)}
    assert len(heights) == 1
    assert 0 <= heights.pop() <= 1000


def test_a_chart_without_points_is_nothing() -> None:
    assert chart_html(Chart("E", "u", [Series("a", [])])) == ""
    assert sparkline_svg([(1, 1.0)]) == ""
    assert "<svg" in sparkline_svg([(1, 1.0), (2, 1.0)])


def test_a_limit_is_drawn_only_where_the_axis_reaches_it() -> None:
    low, high = (
        chart_html(Chart("K", "u", [Series("a", [(1, 0.0), (2, top)])], limits=[(0.05, "warning above this")]))
        for top in (0.001, 0.1)
    )
    assert "warning above this" not in low
    assert "warning above this" in high


@pytest.mark.parametrize("stacked", [False, True])
def test_a_long_curve_keeps_its_spikes_and_its_size(stacked: bool) -> None:
    points = [(float(i), 0.0) for i in range(50_000)]
    points[31_337] = (31_337.0, 9.0)
    points[777] = (777.0, -9.0)
    kept = thinned(Series("a", points), stacked).points
    assert len(kept) <= 810
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    if not stacked:
        assert {(31_337.0, 9.0), (777.0, -9.0)} <= set(kept)


def test_smoothing_keeps_constants_and_does_not_lag() -> None:
    assert [y for _, y in smooth([(i, 3.0) for i in range(50)], 9)] == pytest.approx([3.0] * 50)
    ramp = smooth([(float(i), float(i)) for i in range(101)], 9)
    assert ramp[50][1] == pytest.approx(50.0, abs=1e-3)


def test_only_long_noisy_curves_are_calmed() -> None:
    noisy = Series("n", [(i, float(i % 2)) for i in range(200)])
    rising = Series("r", [(i, float(i)) for i in range(200)])
    chart = calmed(Chart("C", "u", [noisy, rising]))
    assert [(line.label, line.faint) for line in chart.series] == [("n, each step", True), ("n", False), ("r", False)]
    assert chart.series[0].points == noisy.points
    short = Chart("C", "u", [Series("n", noisy.points[:50])])
    assert calmed(short).series == short.series
    columns = Chart("C", "u", [noisy], stacked=True)
    assert calmed(columns) is columns


@pytest.mark.parametrize("value", [0.0, 1.0, 1e30, -1e300])
def test_a_flat_curve_of_any_size_has_a_sparkline(value):
    assert 'class="line t1"' in sparkline_svg([(1.0, value), (2.0, value)])
