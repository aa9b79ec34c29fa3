"""Who did what when: spans, waits and fill by hand, the file, and the pictures made of it."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles.observe.live import LiveView
from miles.observe.metrics import group_metrics, ready_fraction
from miles.observe.recorder import Recorder
from miles.observe.report import report_html
from miles.observe.report_timeline import timeline_html
from miles.observe.rundir import read_run
from miles.observe.timeline import TIMELINE_FILE, levels, merged, timeline_of
from miles.observe.watch import watch
from miles.types import Collected

# Two steps of ten seconds. a works from 0 to 6 on two groups and from 10 to 14; b from 2 to 8 and is dropped from 11 to 12.
ROWS: list[dict[str, Any]] = [
    {
        "step": 1,
        "learner": [["collect", 0.0, 8.0], ["update", 8.0, 10.0]],
        "groups": [[0, "a", 0.0, 4.0, None], [1, "a", 3.0, 6.0, None], [2, "b", 2.0, 8.0, None]],
    },
    {
        "step": 2,
        "learner": [["collect", 10.0, 15.0], ["update", 15.0, 20.0]],
        "groups": [[3, "a", 10.0, 14.0, None], [4, "b", 11.0, 12.0, "equal_rewards"]],
    },
]


def test_intervals_are_merged_and_counted_as_by_hand() -> None:
    assert merged([(3, 6), (0, 4), (8, 9)]) == [(0, 6), (8, 9)]
    assert levels([(0, 4), (3, 6), (4, 5)]) == [(0, 1), (3, 2), (5, 1), (6, 0)]


def test_waits_are_those_counted_by_hand() -> None:
    timeline = timeline_of(ROWS)
    assert timeline is not None
    assert timeline.window == (0.0, 20.0)
    waits = {wait.role: (wait.seconds, wait.share) for wait in timeline.waits()}
    assert waits == {"learner": (13.0, 0.65), "a": (10.0, 0.5), "b": (13.0, 0.65)}


def test_the_fill_counts_groups_from_their_storing_to_their_taking() -> None:
    timeline = timeline_of(ROWS)
    assert timeline is not None
    assert timeline.ready == [(4.0, 1), (6.0, 2), (8.0, 0), (14.0, 1), (15.0, 0)]


def test_only_the_last_steps_are_looked_at() -> None:
    timeline = timeline_of(ROWS, 1)
    assert timeline is not None
    assert timeline.steps == (2, 2)
    assert timeline.waits()[0].share == 0.5


@pytest.mark.parametrize(
    "bad", [None, 3, [["collect", 1.0]], [["collect", "x", 2.0]], [["collect", 3.0, 2.0]], [[1e300] * 3]]
)
def test_what_is_no_span_is_left_out(bad: Any) -> None:
    assert timeline_of([{"step": 1, "learner": bad, "groups": bad}]) is None
    assert timeline_html([{"step": 1, "learner": bad, "groups": bad}]).startswith('<p class="empty">')


def test_ready_is_the_share_of_kept_groups_that_were_stored_in_time() -> None:
    groups = [
        Collected(0, "a", 1.0, 5.0, None),
        Collected(1, "a", 2.0, 9.0, None),
        Collected(2, "a", 2.0, 3.0, "error"),
    ]
    assert ready_fraction(groups, 5.0) == 0.5
    assert ready_fraction(groups, 9.5) == 1.0
    assert ready_fraction(groups[2:], 9.5) is None


def test_groups_are_counted_by_their_staleness(synthetic: ModuleType) -> None:
    groups = [synthetic.finished_group(i, [1.0], version_min=v) for i, v in enumerate((5, 5, 3))]
    groups.append(synthetic.finished_group(3, [1.0], reason="error", version_min=1))
    row = group_metrics(groups, 5)
    assert {key: value for key, value in row.items() if key.startswith("staleness/")} == {
        "staleness/mean": pytest.approx(2 / 3),
        "staleness/max": 2,
        "staleness/groups/0": 2,
        "staleness/groups/2": 1,
    }


def test_the_recorder_lays_spans_out_by_the_clock_and_a_rewind_cuts_them(tmp_path: Path) -> None:
    now = iter([10.0, 20.0, 30.0, 40.0, 50.0])
    recorder = Recorder(tmp_path, clock=lambda: next(now))
    for step in (1, 2):
        with recorder.span("collect"):
            pass
        recorder.timeline(step, [Collected(step, "c", 1.0, 2.5, None)])
    rows = [json.loads(line) for line in (tmp_path / TIMELINE_FILE).read_text().splitlines()]
    assert [row["learner"][0][:2] for row in rows] == [["collect", 10.0], ["collect", 20.0]]
    assert rows[1]["groups"] == [[2, "c", 1.0, 2.5, None]]
    recorder.rewind(1)
    assert [json.loads(line)["step"] for line in (tmp_path / TIMELINE_FILE).read_text().splitlines()] == [1]


def test_the_report_and_the_live_view_show_them(
    tmp_path: Path, synthetic: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(stale=True, drops=True))
    synthetic.write_jsonl(run_dir / TIMELINE_FILE, ROWS)
    page = report_html(read_run(run_dir))
    assert "Steps 1 to 2" in page
    assert "<title>step 2: update, 5.0 s</title>" in page
    assert "a, at most 2 at once" in page
    assert "ready groups, at most 2" in page
    assert '<td>b</td><td class="n">13 s</td><td class="n">65%</td>' in page
    watch(run_dir, follow=False, view=LiveView("on", width=100))
    shown = capsys.readouterr().out
    assert "waited: learner 65%, a 50%, b 65%" in shown
    assert "dropped: equal_rewards" in shown


def test_a_hostile_worker_name_stays_text(tmp_path: Path) -> None:
    name = "<script>x</script>\x1b[2J"
    row = {"step": 1, "learner": [["update", 0.0, 1.0]], "groups": [[0, name, 0.0, 1.0, None]]}
    page = timeline_html([row])
    assert "<script>" not in page
    assert "\x1b" not in page
