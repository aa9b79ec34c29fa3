"""Watching a run directory: finished, dead, running, resumed, just started."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from miles.errors import RunDirError
from miles.observe.live import LiveView
from miles.observe.watch import Tail, watch


def plain() -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    return LiveView("off", stream, width=100), stream


def steps_in(text: str, total: int) -> list[int]:
    words = [line.split()[0] for line in text.splitlines() if line.strip()]
    return [int(word.split("/")[0]) for word in words if word.endswith(f"/{total}")]


class Writer:
    """Stands for the training process: does the next thing each time the watcher sleeps."""

    def __init__(self, *acts: Callable[[], object]) -> None:
        self._acts = list(acts)
        self.slept = 0

    def __call__(self, seconds: float) -> None:
        assert seconds == 0.5
        self.slept += 1
        assert self.slept < 50, "watch does not end"
        if self._acts:
            self._acts.pop(0)()


def never(seconds: float) -> None:
    raise AssertionError("a run that has ended is not waited for")


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def append(run_dir: Path, step: int, end: str = "\n") -> None:
    row = {"step": step, "version": step, "reward/mean": 0.5, "time": 1.0}
    add(run_dir / "metrics.jsonl", json.dumps(row) + end)


def test_a_finished_run_is_shown_whole_and_watching_ends(tmp_path: Path, synthetic: ModuleType) -> None:
    view, stream = plain()
    watch(synthetic.make_run(tmp_path / "run", synthetic.Shape()), view=view, sleep=never)
    assert steps_in(stream.getvalue(), 16) == list(range(1, 17))
    assert "sample:" in stream.getvalue()


def test_a_dead_run_is_shown_and_said_to_be_dead(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(written=7, finished=False))
    add(run_dir / "metrics.jsonl", '{"step": 8, "ver')
    view, stream = plain()
    age = 7200 + (run_dir / "metrics.jsonl").stat().st_mtime
    watch(run_dir, view=view, sleep=never, now=lambda: age)
    assert steps_in(stream.getvalue(), 16) == list(range(1, 8))
    assert "has written no row for 2h 00m and has no final model" in stream.getvalue()
    assert "--resume" in stream.getvalue()
    assert "1 line(s) could not be read" in stream.getvalue()


def test_a_running_run_is_followed_to_its_end(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(total=4, written=1, finished=False))
    view, stream = plain()
    writer = Writer(
        lambda: append(run_dir, 2, end=""),  # half a line is not shown yet
        lambda: add(run_dir / "metrics.jsonl", "\n"),
        lambda: (append(run_dir, 3), append(run_dir, 4), (run_dir / "final").mkdir()),
    )
    watch(run_dir, view=view, sleep=writer)
    assert steps_in(stream.getvalue(), 4) == [1, 2, 3, 4]


def test_a_run_that_has_written_nothing_yet_is_waited_for(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(synthetic.recipe_text(synthetic.Shape(total=1)))
    view, stream = plain()
    watch(run_dir, view=view, sleep=Writer(lambda: None, lambda: (append(run_dir, 1), (run_dir / "final").mkdir())))
    assert steps_in(stream.getvalue(), 1) == [1]


def test_a_resume_under_the_watcher_starts_the_picture_anew(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(total=4, written=3, finished=False))

    def resume() -> None:
        metrics = run_dir / "metrics.jsonl"
        part = run_dir / "part"
        part.write_text("".join(line + "\n" for line in metrics.read_text().splitlines()[:2]))
        os.replace(part, metrics)

    view, stream = plain()
    finish = Writer(resume, lambda: [append(run_dir, step) for step in (2, 3, 4)], lambda: (run_dir / "final").mkdir())
    watch(run_dir, view=view, sleep=finish)
    assert "the run was resumed" in stream.getvalue()
    assert steps_in(stream.getvalue(), 4) == [1, 2, 3, 1, 2, 3, 4]
    assert [row["step"] for row in view.progress.steps] == [1, 2, 3, 4]


def test_an_older_final_model_does_not_end_the_watching_of_a_run_that_goes_on(
    tmp_path: Path, synthetic: ModuleType
) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(total=4, written=3))
    os.utime(run_dir / "final", (1.0, 1.0))
    view, stream = plain()
    watch(run_dir, view=view, sleep=Writer(lambda: append(run_dir, 4), lambda: os.utime(run_dir / "final")))
    assert steps_in(stream.getvalue(), 4) == [1, 2, 3, 4]


def test_without_follow_nothing_is_waited_for(tmp_path: Path, synthetic: ModuleType) -> None:
    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(written=5, finished=False))
    view, stream = plain()
    watch(run_dir, follow=False, view=view, sleep=never)
    assert steps_in(stream.getvalue(), 16) == [1, 2, 3, 4, 5]


def test_ctrl_c_ends_the_watching_only(tmp_path: Path, synthetic: ModuleType) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    run_dir = synthetic.make_run(tmp_path / "run", synthetic.Shape(written=5, finished=False))
    view, stream = plain()
    watch(run_dir, view=view, sleep=interrupt)
    assert "the run itself is not touched" in stream.getvalue()


def test_no_run_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="there is no run directory"):
        watch(tmp_path / "nowhere")
    with pytest.raises(RunDirError, match=r"holds no run: it has neither config\.toml nor metrics\.jsonl"):
        watch(tmp_path)


def test_a_tail_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_bytes(b'{"a": 1}\nnot json\n{"a"')
    assert tail.read() == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b": 2}\n")
    assert tail.read() == [{"a": 2}]
    assert not tail.restarted
    path.write_bytes(b'{"a": 3}\n')
    assert tail.read() == [{"a": 3}]
    assert tail.restarted
