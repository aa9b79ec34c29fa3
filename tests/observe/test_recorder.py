"""What stands in metrics.jsonl and samples.jsonl, after any kind of stop."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from miles.errors import RunDirError
from miles.observe.recorder import Recorder, peak_memory_bytes


class MemorySink:
    def __init__(self, fails: bool = False) -> None:
        self.rows: list[Mapping[str, Any]] = []
        self.calls = 0
        self.closed = False
        self._fails = fails

    def log(self, row: Mapping[str, Any]) -> None:
        self.calls += 1
        if self._fails:
            raise ConnectionError("no route")
        self.rows.append(row)

    def close(self) -> None:
        self.closed = True


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def record(run_dir: Path, synthetic: ModuleType, versions: range, recorder: Recorder | None = None) -> Recorder:
    """Steps as a loop records them: row, samples, an evaluation every second version."""
    recorder = recorder or Recorder(run_dir, clock=lambda: 5.0)
    for version in versions:
        if version == 0 and not recorder.evaluated(0):
            recorder.eval({"version": 0, "eval/reward/mean": 0.0}, [synthetic.group(0, 90, ["a"])])
        step = version + 1
        recorder.step({"step": step, "version": step, "reward/mean": step / 10})
        groups = [(synthetic.group(8 * step + i, (step * 3 + i) % 5, [f"{step}"]), None) for i in range(4)]
        recorder.samples(step, groups)
        if step % 2 == 0:
            recorder.eval({"version": step, "eval/reward/mean": 0.5}, [synthetic.group(0, 90, ["b"])])
    return recorder


def test_a_row_is_on_disk_with_its_time_and_spans(tmp_path: Path) -> None:
    sink = MemorySink()
    recorder = Recorder(tmp_path, [sink], clock=lambda: 12.3456)
    with recorder.span("collect"):
        pass
    with recorder.span("collect"):
        pass
    assert recorder.elapsed("collect") > 0
    written = recorder.step({"step": 1, "version": 1, "reward/mean": 0.25})
    assert rows_of(tmp_path / "metrics.jsonl") == [written] == sink.rows
    assert written["time"] == 12.346
    assert 0 < written["time/collect_s"] < 1
    assert "time/collect_s" not in recorder.step({"step": 2, "version": 2})
    recorder.close()
    assert sink.closed


def test_a_span_counts_when_its_block_raises(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    with pytest.raises(KeyError), recorder.span("update"):
        raise KeyError
    assert recorder.elapsed("update") > 0
    assert recorder.elapsed("never") == 0


def test_not_finite_numbers_are_left_out_and_named(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.step({"step": 1, "version": 1, "loss/policy": float("nan"), "ratio/max": float("inf"), "lr": 1e-5})
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    row = json.loads(text)
    assert row["not_finite"] == ["loss/policy", "ratio/max"]
    assert "loss/policy" not in row
    assert row["lr"] == 1e-5


@pytest.mark.parametrize("row", [{"version": 1}, {"step": 1}])
def test_a_row_without_its_place_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs the keys step and version"):
        Recorder(tmp_path).step(row)
    with pytest.raises(ValueError, match="needs the key version"):
        Recorder(tmp_path).eval({"eval/reward/mean": 1.0})


@pytest.mark.parametrize("stop", [0, 1, 2, 3, 5])
def test_a_resumed_run_leaves_the_files_of_the_unbroken_one(tmp_path: Path, synthetic: ModuleType, stop: int) -> None:
    record(tmp_path / "whole", synthetic, range(6))
    record(tmp_path / "broken", synthetic, range(5))
    with (tmp_path / "broken" / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "vers')  # killed while it wrote
    resumed = Recorder(tmp_path / "broken", clock=lambda: 5.0)
    resumed.rewind(stop)
    record(tmp_path / "broken", synthetic, range(stop, 6), resumed)
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list((tmp_path / "broken").glob("*.part"))


def test_rewinding_keeps_the_evaluation_of_the_version_itself(tmp_path: Path, synthetic: ModuleType) -> None:
    recorder = record(tmp_path, synthetic, range(4))
    recorder.rewind(2)
    assert [recorder.evaluated(version) for version in (0, 2, 4)] == [True, True, False]


def test_half_a_line_is_not_written_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "version": 1}\n{"st')
    with pytest.raises(RunDirError, match="half a line: continue the run with --resume"):
        Recorder(tmp_path).step({"step": 2, "version": 2})


def test_a_damaged_line_in_the_middle_stops_the_rewind_and_removes_nothing(tmp_path: Path) -> None:
    damaged = b'{"step": 1, "version": 1}\n{"step": 2, "ver\n{"step": 3, "version": 3}\n'
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    with pytest.raises(RunDirError, match=r"metrics\.jsonl line 2 is no JSON object"):
        Recorder(tmp_path).rewind(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == damaged


def test_rewinding_a_run_without_files_is_nothing(tmp_path: Path) -> None:
    Recorder(tmp_path / "new").rewind(0)
    assert list((tmp_path / "new").iterdir()) == []


FULL_DISK = """
import resource, sys
from pathlib import Path
from miles.errors import MilesError
from miles.observe.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
recorder.step({"step": 1, "version": 1})
try:
    recorder.step({"step": 2, "version": 2, "filler": "x" * 100})
except MilesError as error:
    print(error.exit_code, error)
"""


def test_a_disk_that_takes_no_more_is_one_sentence_with_a_way_out(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"1 cannot write {tmp_path / 'metrics.jsonl'}: File too large. Free space")
    assert "--resume" in run.stdout
    Recorder(tmp_path).rewind(1)  # what --resume does: the half-written row goes
    assert [row["step"] for row in rows_of(tmp_path / "metrics.jsonl")] == [1]


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = MemorySink(fails=True), MemorySink()
    recorder = Recorder(tmp_path, [bad, good])
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            recorder.step({"step": step, "version": step})
    assert bad.calls == 1
    assert len(good.rows) == 2
    assert len(rows_of(tmp_path / "metrics.jsonl")) == 2
    assert "MemorySink failed and gets no more rows: ConnectionError: no route" in caplog.text


def test_a_sink_that_joins_later_gets_the_rows_from_then_on(tmp_path: Path) -> None:
    recorder, sink = Recorder(tmp_path), MemorySink()
    recorder.step({"step": 1, "version": 1})
    recorder.add_sink(sink)
    recorder.step({"step": 2, "version": 2})
    assert [row["step"] for row in sink.rows] == [2]


def test_samples_follow_the_data_rows_that_were_shown_before(tmp_path: Path, synthetic: ModuleType) -> None:
    recorder = Recorder(tmp_path, samples_per_step=1)
    recorder.samples(1, [(synthetic.group(0, 7, ["first"]), None), (synthetic.group(1, 8, ["other"]), None)])
    recorder.samples(2, [(synthetic.group(2, 8, ["other"]), None), (synthetic.group(3, 7, ["again"]), None)])
    rows = rows_of(tmp_path / "samples.jsonl")
    assert [(row["step"], row["row"], row["samples"][0]["text"]) for row in rows] == [(1, 7, "first"), (2, 7, "again")]
    again = Recorder(tmp_path, samples_per_step=1)
    again.samples(3, [(synthetic.group(4, 8, ["other"]), None), (synthetic.group(5, 7, ["third"]), None)])
    assert rows_of(tmp_path / "samples.jsonl")[-1]["row"] == 7


def test_dropped_groups_are_shown_with_their_reason(tmp_path: Path, synthetic: ModuleType) -> None:
    recorder = Recorder(tmp_path, samples_per_step=1)
    groups = [
        (synthetic.group(0, 0, ["a", "b"]), None),
        (synthetic.group(1, 1, ["c"], reward=None), "unscored: no answer"),
    ]
    recorder.samples(1, groups)
    trained, dropped = rows_of(tmp_path / "samples.jsonl")
    assert trained["reason"] is None
    assert [sample["text"] for sample in trained["samples"]] == ["a", "b"]
    assert trained["samples"][0] == {
        "text": "a",
        "reward": 1.0,
        "parts": {"exact": 1.0},
        "tokens": 2,
        "stop_reason": "stop",
    }
    assert dropped["reason"] == "unscored: no answer"
    assert dropped["samples"][0]["reward"] is None


def test_text_of_any_kind_is_one_json_line(tmp_path: Path, synthetic: ModuleType) -> None:
    recorder = Recorder(tmp_path, samples_per_step=3)
    texts = ["naïve 数\n\t\u2028", "\ud800 alone", synthetic.HOSTILE]
    recorder.samples(1, [(synthetic.group(0, 0, texts), None)])
    data = (tmp_path / "samples.jsonl").read_bytes()
    assert data.count(b"\n") == 1
    assert [sample["text"] for sample in json.loads(data)["samples"]] == texts


def test_no_samples_are_written_when_none_are_asked_for(tmp_path: Path, synthetic: ModuleType) -> None:
    Recorder(tmp_path, samples_per_step=0).samples(1, [(synthetic.group(0, 0, ["a"]), None)])
    assert not (tmp_path / "samples.jsonl").exists()


def test_peak_memory_is_in_bytes() -> None:
    assert 5 * 2**20 < peak_memory_bytes() < 2**40
