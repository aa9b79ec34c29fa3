"""The live view over a run directory, from its files alone: running, finished or dead, on this machine or a mounted one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from miles.observe.live import LiveView
from miles.observe.progress import RECENT_STEPS
from miles.observe.rows import METRICS_FILE, SAMPLES_FILE, Row, parse_row, value_of
from miles.observe.rundir import RunData, final_time, has_ended, read_run
from miles.observe.text import duration
from miles.observe.timeline import TIMELINE_FILE

POLL_S = 0.5
QUIET_S = 600.0
QUIET_STEPS = 20
"""A run that wrote no row for QUIET_S seconds and for QUIET_STEPS of its usual steps is taken for stopped."""


class Tail:
    """Reads the whole new lines of a growing file; `restarted` says that it was replaced or cut, as a resume does."""

    def __init__(self, path: Path) -> None:
        self.restarted = False
        self._path = path
        self._position = 0
        self._identity: tuple[int, int] | None = None

    def read(self) -> list[dict[str, Any]]:
        self.restarted = False
        try:
            with self._path.open("rb") as file:
                stat = os.fstat(file.fileno())
                identity = stat.st_dev, stat.st_ino
                if identity != self._identity or stat.st_size < self._position:
                    self.restarted = self._position > 0
                    self._position, self._identity = 0, identity
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self._position += whole
        return [row for line in data[:whole].split(b"\n") if line and (row := parse_row(line)) is not None]


def watch(
    run_dir: Path,
    follow: bool = True,
    view: LiveView | None = None,
    sleep: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
) -> None:
    """Show the run and, with `follow`, what it still writes, until it has ended. Ctrl-C ends the watching, not the run.

    A run that has been quiet for long when watching begins is shown as it is, with a line that says so; one that falls
    quiet later is waited for, since it may be resumed. `now` gives seconds since the epoch, to compare with the files'.
    Raises RunDirError where there is no run.
    """
    data = read_run(run_dir)
    shown = view or LiveView()
    for problem in data.problems:
        shown.message(problem)
    metrics, samples, timeline = (Tail(run_dir / name) for name in (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE))
    shown.start(data.facts, data.total_steps)
    try:
        _show_timeline(shown, timeline.read())
        shown.catch_up(metrics.read())
        _show_sample(shown, samples.read())
        quiet = _quiet_for(run_dir, shown, now)
        if quiet is not None and not data.ended:
            shown.message(_stopped(data, quiet))
        elif follow:
            _follow(run_dir, data, shown, metrics, samples, timeline, sleep)
    except KeyboardInterrupt:
        shown.message("no longer watching; the run itself is not touched")
    finally:
        shown.stop()


def _follow(
    run_dir: Path, data: RunData, shown: LiveView, metrics: Tail, samples: Tail, timeline: Tail,
    sleep: Callable[[float], None],
) -> None:  # fmt: skip
    while True:
        ended = has_ended(final_time(run_dir), shown.progress.steps)
        rows = metrics.read()
        if metrics.restarted:
            shown.start(data.facts, data.total_steps)
            shown.message("the run was resumed: its rows are read again")
            _show_timeline(shown, timeline.read())
            shown.catch_up(rows)
        else:
            _show_timeline(shown, timeline.read())
            for row in rows:
                shown.log(row)
        _show_sample(shown, samples.read())
        if ended and not rows:
            return
        sleep(POLL_S)


def _show_timeline(shown: LiveView, rows: list[dict[str, Any]]) -> None:
    for row in rows[-RECENT_STEPS:]:
        shown.timeline(row)


def _show_sample(shown: LiveView, rows: list[dict[str, Any]]) -> None:
    """The first answer of the newest group."""
    for row in reversed(rows):
        answers = row.get("samples")
        if isinstance(answers, list) and answers and isinstance(answers[0], dict):
            answer: Row = answers[0]
            shown.sample(str(row.get("prompt", "")), str(answer.get("text", "")), value_of(answer, "reward"))
            return


def _quiet_for(run_dir: Path, shown: LiveView, now: Callable[[], float]) -> float | None:
    """Seconds since the last row, where that is so long that the run must have stopped; None otherwise."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return None
    age = now() - path.stat().st_mtime
    return age if age > max(QUIET_S, QUIET_STEPS * (shown.progress.usual_step_s or 0.0)) else None


def _stopped(data: RunData, quiet_s: float) -> str:
    return (
        f"{data.run_dir} has written no row for {duration(quiet_s)} and has no final model: it seems to have stopped. "
        "`miles train RECIPE --run DIR --resume` continues it"
    )
