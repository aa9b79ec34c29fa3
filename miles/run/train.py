"""`miles train`, and the same from Python."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.load import COMMAND_LINE
from miles.errors import BadInput, MilesError, TrainingAborted
from miles.observe.live import LiveView
from miles.observe.report import REPORT_FILE, write_report
from miles.observe.rows import METRICS_FILE, read_rows
from miles.run.local import FAILED_OUTSIDE_OF_UPDATES, LocalLauncher
from miles.run.logs import said
from miles.run.prepare import RewardArgument, prepare
from miles.run.recipes import inspect
from miles.run.rundir import check_run_dir, default_run_dir


@dataclass(frozen=True)
class TrainedRun:
    """A finished run."""

    run_dir: Path
    exit_code: int

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; those of evaluations hold `"event": "eval"`."""
        return read_rows(self.run_dir / METRICS_FILE).rows

    @property
    def model_dir(self) -> Path:
        """The trained model: a plain Hugging Face folder."""
        return self.run_dir / "final"


def train_command(recipes: Sequence[Path], overrides: Mapping[str, Any], run_dir: Path | None, resume: bool) -> int:
    """Train a recipe and say where report and model are. Returns the exit code."""
    if resume and run_dir is None:
        raise BadInput("--resume needs --run DIR: the folder of the run that is to go on")
    started = time.perf_counter()
    run = start_run(recipes, overrides, run_dir, resume)
    if run.exit_code == 0:
        print(f"done in {time.perf_counter() - started:.0f} s")
        print(f"model:  {_from_here(run.model_dir)}")
    print(f"report: {_from_here(run.run_dir / REPORT_FILE)}")
    return run.exit_code


def start_run(
    recipes: Sequence[Path],
    overrides: Mapping[str, Any],
    run_dir: Path | None = None,
    resume: bool = False,
    *,
    rows: Iterable[Mapping[str, Any]] | None = None,
    reward: RewardArgument | None = None,
    env: Mapping[str, str] = os.environ,
    overrides_from: str = COMMAND_LINE,
) -> TrainedRun:
    """Resolve the recipe, check everything that can be checked without weights, train, and write the report."""
    here = Path.cwd()  # the user's own code may go elsewhere, as soon as it is imported
    resolved = inspect(recipes, overrides, env, given=_given(rows, reward), overrides_from=overrides_from)
    recipe = resolved.recipe
    target = here / (run_dir or default_run_dir(recipes[0].stem if recipes else recipe.algorithm.name))
    check_run_dir(target, recipe, resume)
    view = LiveView(recipe.log.live)
    for warning in resolved.warnings:
        view.message(f"warning: {warning}")
    with said(view.message):
        inputs = prepare(recipe, resolved.row, rows=rows, reward=reward)
    try:
        code = LocalLauncher(recipe, resolved.row, inputs, target, resume, view).launch()
    except (TrainingAborted, *FAILED_OUTSIDE_OF_UPDATES):
        with contextlib.suppress(MilesError):  # of the two errors the first one counts
            write_report(target)
        raise
    write_report(target)
    return TrainedRun(target, code)


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _given(rows: object, reward: object) -> Collection[str]:
    return [key for key, value in (("data.source", rows), ("reward.functions", reward)) if value is not None]
