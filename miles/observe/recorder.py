"""Writes what a run measured: metrics.jsonl, samples.jsonl and timeline.jsonl, one durable line after the other, and every sink."""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.errors import MilesError, RunDirError
from miles.observe.rows import METRICS_FILE, SAMPLES_FILE, SCORES_FILE, is_eval, parse_row, read_rows, version_of
from miles.observe.timeline import TIMELINE_FILE
from miles.protocols import MetricsSink
from miles.types import Collected, Group, Sample

log = logging.getLogger(__name__)

NOT_FINITE = "not_finite"
"""Row key that names the metrics left out of the row because they were NaN or infinite."""


class Recorder:
    """The one writer of a run's metrics and samples.

    A row is on disk when `step` or `eval` returns. The file is the truth: a sink that raises is closed and left out
    from then on, with a warning in the log. `clock` gives seconds since the epoch, for the `time` of each row.
    """

    def __init__(
        self,
        run_dir: Path,
        sinks: Sequence[MetricsSink] = (),
        samples_per_step: int = 2,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.run_dir = run_dir
        self._sinks = list(sinks)
        self._samples_per_step = samples_per_step
        self._clock = clock
        self._spans: dict[str, float] = {}
        self._laid: list[tuple[str, float, float]] = []  # each span by the clock, since the last row of the timeline
        self._followed: set[int] = set()
        self._evaluated: set[int] = set()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._load()

    def add_sink(self, sink: MetricsSink) -> None:
        """Rows go to this sink too, from the next one on."""
        self._sinks.append(sink)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Adds the block's wall-clock seconds to `time/<name>_s` of the next row."""
        start, began = time.perf_counter(), self._clock()
        try:
            yield
        finally:
            key, seconds = f"time/{name}_s", time.perf_counter() - start
            self._spans[key] = self._spans.get(key, 0.0) + seconds
            self._laid.append((name, began, began + seconds))

    def elapsed(self, name: str) -> float:
        """Seconds that spans of this name have taken since the last row; 0 when there was none."""
        return self._spans.get(f"time/{name}_s", 0.0)

    def step(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Write one step's row, which holds `step` and `version`; returns the row as written.

        Adds `time` and the spans that ended since the last row. A NaN or infinite number is no measurement and no
        valid JSON: its key is left out and named in `not_finite`, which `observe.warnings` reports.
        """
        if "step" not in row or "version" not in row:
            raise ValueError(f"a step's row needs the keys step and version, got {sorted(row)}")
        return self._write(row)

    def eval(self, row: Mapping[str, Any], groups: Sequence[Group] = ()) -> dict[str, Any]:
        """Write one evaluation's row, which holds `version`, and the first held-out groups as samples."""
        if "version" not in row:
            raise ValueError(f"an evaluation's row needs the key version, got {sorted(row)}")
        self._evaluated.add(version_of(row))
        written = self._write({"event": "eval", **row})
        lines = [{"event": "eval", "version": row["version"], **_as_text(g, None)} for g in self._first(groups)]
        _append(self.run_dir / SAMPLES_FILE, lines)
        return written

    def evaluated(self, version: int) -> bool:
        """Whether the file holds an evaluation of this version, so that a resumed run need not repeat it."""
        return version in self._evaluated

    def samples(self, step: int, groups: Sequence[tuple[Group, str | None]]) -> None:
        """Write some of a step's finished groups as text, each with the reason it was dropped for, or None.

        Of the trained and of the dropped ones up to `samples_per_step` each: first those of data rows that were shown
        before, so that a reader can follow one prompt through the run, then by ordinal.
        """
        trained = self._first([group for group, reason in groups if reason is None])
        dropped = self._first([group for group, reason in groups if reason is not None])
        reasons = {group.ordinal: reason for group, reason in groups}
        shown = [*trained, *dropped]
        lines = [{"step": step, **_as_text(group, reasons[group.ordinal])} for group in shown]
        _append(self.run_dir / SAMPLES_FILE, lines)
        self._followed |= {group.row for group in shown}

    def scores(self, step: int, groups: Sequence[Group]) -> None:
        """Write the rewards of a step that the ledger does not hold, of all its groups in the order of the manifest: those whose
        reward model is a role of the learner's. Nothing where there are none."""
        rewards = {str(group.ordinal): [_finite(reward) for reward in group.rewards] for group in groups}
        parts = {str(group.ordinal): [_parts(sample) for sample in group.samples] for group in groups}
        _append(self.run_dir / SCORES_FILE, [{"step": step, "rewards": rewards, "parts": parts}] if groups else [])

    def timeline(self, step: int, collected: Sequence[Collected]) -> dict[str, Any]:
        """Write who did what when for one step: the spans that ended since the last such row, and its groups."""
        learner, self._laid = [[name, round(start, 3), round(end, 3)] for name, start, end in self._laid], []
        groups = [
            [each.ordinal, each.worker, round(each.start, 3), round(each.end, 3), each.reason] for each in collected
        ]
        row = {"step": step, "learner": learner, "groups": groups}
        _append(self.run_dir / TIMELINE_FILE, [row])
        return row

    def rewind(self, version: int) -> None:
        """Remove every row above `version`, atomically, so that a resumed run's files equal the unbroken run's.

        A half-written last line goes too. Raises RunDirError when another line is damaged: nothing is removed then.
        """
        for name in (METRICS_FILE, SAMPLES_FILE, SCORES_FILE, TIMELINE_FILE):
            _keep_rows(self.run_dir / name, version)
        self._spans.clear()
        self._laid.clear()
        self._load()

    def close(self) -> None:
        for sink in self._sinks:
            self._guarded(sink, sink.close)
        self._sinks = []

    def _load(self) -> None:
        self._evaluated = {version_of(row) for row in read_rows(self.run_dir / METRICS_FILE).rows if is_eval(row)}
        rows = read_rows(self.run_dir / SAMPLES_FILE).rows
        self._followed = {row["row"] for row in rows if not is_eval(row) and isinstance(row.get("row"), int)}

    def _first(self, groups: Sequence[Group]) -> list[Group]:
        ranked = sorted(groups, key=lambda group: (group.row not in self._followed, group.ordinal))
        return ranked[: self._samples_per_step]

    def _write(self, row: Mapping[str, Any]) -> dict[str, Any]:
        spans, self._spans = self._spans, {}
        full = {**row, "time": round(self._clock(), 3), **spans}
        bad = [key for key, value in full.items() if isinstance(value, float) and not math.isfinite(value)]
        finite = {key: value for key, value in full.items() if key not in bad}
        if bad:
            finite[NOT_FINITE] = bad
        _append(self.run_dir / METRICS_FILE, [finite])
        for sink in list(self._sinks):
            if not self._guarded(sink, lambda sink=sink: sink.log(finite)):
                self._sinks.remove(sink)
        return finite

    def _guarded(self, sink: MetricsSink, call: Callable[[], None]) -> bool:
        try:
            call()
        except Exception as error:
            # A tracker is a copy for people: losing it must not end a training run whose rows are on disk.
            log.warning("%s failed and gets no more rows: %s: %s", type(sink).__name__, type(error).__name__, error)
            return False
        return True


def peak_memory_bytes() -> int:
    """Largest resident size that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _as_text(group: Group, reason: str | None) -> dict[str, Any]:
    return {
        "ordinal": group.ordinal,
        "row": group.row,
        "reason": reason,
        "prompt": group.prompt_text,
        "samples": [
            {
                "text": sample.text,
                "reward": _finite(sample.reward),
                "parts": _parts(sample),
                "tokens": sample.num_trained,
                "stop_reason": sample.stop_reason,
            }
            for sample in group.samples
        ],
    }


def _parts(sample: Sample) -> dict[str, float | None]:
    return {name: _finite(value) for name, value in sample.reward_parts.items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    data = b"".join(_line(row) for row in rows)
    try:
        with path.open("ab") as file:
            if _torn(path):
                raise RunDirError(f"{path} ends in half a line: continue the run with --resume, which cuts it off")
            file.write(data)
            file.flush()
            if path.is_file():
                os.fsync(file.fileno())
    except OSError as error:
        raise MilesError(
            f"cannot write {path}: {error.strerror or error}. Free space or mend the disk, then continue with --resume"
        ) from error


def _line(row: Mapping[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8 form; its JSON escape has
        return json.dumps(row, allow_nan=False).encode() + b"\n"


def _torn(path: Path) -> bool:
    size = path.stat().st_size
    if size == 0:
        return False
    with path.open("rb") as file:
        file.seek(size - 1)
        return file.read(1) != b"\n"


def _keep_rows(path: Path, version: int) -> None:
    if not path.exists():
        return
    *lines, tail = path.read_bytes().split(b"\n")
    kept = []
    for number, line in enumerate(lines, start=1):
        row = parse_row(line)
        if row is None:
            raise RunDirError(
                f"{path} line {number} is no JSON object: {line[:80]!r}. Restore or remove that line, then resume"
            )
        if version_of(row) <= version:
            kept.append(line + b"\n")
    if len(kept) == len(lines) and not tail:
        return
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        _sync_folder(path.parent)
    except OSError as error:
        raise MilesError(f"cannot rewrite {path}: {error.strerror or error}; it is unchanged") from error


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
