"""What each tracker is told, shown by TensorBoard's own reader and by stand-ins for the others' modules."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from miles.config.schema import Log
from miles.errors import ConfigError
from miles.observe.sinks import (
    TensorBoardSink,
    TrackioSink,
    WandbSink,
    load_tracker,
    measured,
    missing_trackers,
    open_sinks,
)

ROWS: list[dict[str, Any]] = [
    {"event": "eval", "version": 0, "time": 1.0, "eval/reward/mean": 0.25},
    {"step": 1, "version": 1, "time": 2.0, "reward/mean": 0.5, "not_finite": ["lr"], "note": "text", "flag": True},
]


class FakeTracker:
    """Stands for the module of a tracker and for the run or writer that it opens."""

    def __init__(self) -> None:
        self.opened: dict[str, Any] = {}
        self.calls: list[Any] = []
        self.finished = False

    def init(self, **options: Any) -> FakeTracker:
        self.opened = options
        return self

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        self.calls.append((step, values))

    def finish(self) -> None:
        self.finished = True


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(folder)
    )
    accumulator.Reload()
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()["scalars"]}


def test_tensorboard_reads_back_each_number_at_its_version(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    sink = TensorBoardSink(tmp_path)
    for row in [*ROWS, {"step": 2, "version": 2, "reward/mean": 0.75}, {"step": 3, "version": 3, "reward/mean": 1.0}]:
        sink.log(row)
    sink.close()
    assert scalars(tmp_path) == {"eval/reward/mean": [(0, 0.25)], "reward/mean": [(1, 0.5), (2, 0.75), (3, 1.0)]}


def test_tensorboard_hides_what_a_resume_takes_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    for start, values in ((0, [0.1, 0.2, 0.3]), (1, [0.9, 0.8])):
        sink = TensorBoardSink(tmp_path, version=start)
        for step, value in enumerate(values, start=start + 1):
            sink.log({"step": step, "version": step, "time": 1e9 + 100 * start + step, "x": value})
        sink.close()
        time.sleep(1.1)  # event files are named by the second and read in the order of their names
    assert scalars(tmp_path)["x"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.9)), (3, pytest.approx(0.8))]


def test_wandb_stays_offline_unless_told_otherwise(tmp_path: Path) -> None:
    fake = FakeTracker()
    sink = WandbSink(tmp_path / "quick", "miles", config={"algorithm": {"name": "grpo"}}, module=fake)
    for row in ROWS:
        sink.log(row)
    sink.close()
    assert fake.opened["mode"] == "offline"
    assert fake.opened["dir"] == str(tmp_path / "quick")
    assert (fake.opened["name"], fake.opened["group"]) == ("quick", "quick")
    assert fake.opened["config"] == {"algorithm": {"name": "grpo"}}
    assert fake.calls == [(None, {"eval/reward/mean": 0.25, "version": 0}), (None, {"reward/mean": 0.5, "version": 1})]
    assert fake.finished


def test_trackio_goes_to_this_machine(tmp_path: Path) -> None:
    fake = FakeTracker()
    sink = TrackioSink(tmp_path / "quick", "project", module=fake)
    for row in ROWS:
        sink.log(row)
    sink.close()
    assert "space_id" not in fake.opened
    assert (fake.opened["project"], fake.opened["name"], fake.opened["resume"]) == ("project", "quick", "allow")
    assert [step for step, _ in fake.calls] == [0, 1]
    assert fake.finished


def test_no_tracker_is_opened_by_default(tmp_path: Path) -> None:
    assert open_sinks(Log(), tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_the_recipe_opens_the_trackers_it_asks_for(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (sink,) = open_sinks(Log(tensorboard=True), tmp_path)
    sink.log(ROWS[1])
    sink.close()
    assert scalars(tmp_path / "tensorboard") == {"reward/mean": [(1, 0.5)]}


def test_a_missing_library_names_key_package_and_extra() -> None:
    with pytest.raises(
        ConfigError, match=r"log\.wandb needs the package no_such_tracker, .*miles-rl\[trackers\]"
    ) as caught:
        load_tracker("no_such_tracker.inside", "log.wandb")
    assert caught.value.exit_code == 2


def test_missing_libraries_are_known_before_a_run() -> None:
    asked = {name: importlib.util.find_spec(name) is None for name in ("tensorboard", "wandb", "trackio")}
    told = list(missing_trackers(Log(tensorboard=True, wandb="offline", trackio=True)))
    assert [text.partition(" ")[0] for text in told] == [f"log.{name}" for name, missing in asked.items() if missing]
    assert all("pip install 'miles-rl[trackers]'" in text for text in told)
    assert list(missing_trackers(Log())) == []


def test_only_finite_numbers_are_sent() -> None:
    row = {"a": 1, "b": float("nan"), "c": True, "d": "x", "e": [1], "f": 10**400, "time": 3.0, "step": 1, "version": 1}
    assert measured(row) == {"a": 1.0}
