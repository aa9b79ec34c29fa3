"""`miles train` and `miles learn`, and the first from Python."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.config.load import COMMAND_LINE
from miles.config.schema import Recipe
from miles.errors import BadInput, ConfigError
from miles.observe.live import LiveView
from miles.observe.report import REPORT_FILE
from miles.observe.rows import METRICS_FILE, read_rows
from miles.run.lifeline import LIFELINE
from miles.run.meeting import Meeting
from miles.run.place import Place, check_place, mesh, world_size
from miles.run.recipes import inspect
from miles.run.rundir import check_run_dir, default_run_dir

if TYPE_CHECKING:
    from miles.run.prepare import RewardArgument


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


def train_command(
    recipes: Sequence[Path], overrides: Mapping[str, Any], run_dir: Path | None, resume: bool, collects: bool = True
) -> int:
    """Train a recipe and say where report and model are. Returns the exit code.

    `collects` False: only learn, from what collectors elsewhere put into the buffer.
    """
    if resume and run_dir is None:
        raise BadInput("--resume needs --run DIR: the folder of the run that is to go on")
    started = time.perf_counter()
    run = start_run(recipes, overrides, run_dir, resume, collects=collects)
    place = Place.of(os.environ)
    if LIFELINE in os.environ or (place is not None and place.rank > 0):
        return run.exit_code  # whoever started the ranks says the rest
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
    collects: bool = True,
) -> TrainedRun:
    """Resolve the recipe, check everything that can be checked without weights, train, and write the report."""
    here = Path.cwd()  # the user's own code may go elsewhere, as soon as it is imported
    resolved = inspect(recipes, overrides, env, given=_given(rows, reward), overrides_from=overrides_from)
    recipe, place = resolved.recipe, Place.of(env)
    meeting = None if collects else Meeting.of(recipe, env)
    target = here / (run_dir or default_run_dir(recipes[0].stem if recipes else recipe.algorithm.name))
    if place is not None:
        check_place(place, recipe)
    if place is None or place.rank == 0:
        check_run_dir(target, recipe, resume)
    view = LiveView(recipe.log.live) if place is None or place.rank == 0 else LiveView("off", io.StringIO())
    if LIFELINE not in env:  # the ranks leave this to whoever started them
        for warning in resolved.warnings:
            view.message(f"warning: {warning}")
    if collects and recipe.run.launcher == "processes":
        _check_sendable(recipe, rows, reward)
        from miles.run.launch import train_in_processes

        return TrainedRun(target, train_in_processes(recipe, target, resume, view.message))
    if collects and recipe.run.launcher == "ray":
        _check_sendable(recipe, rows, reward)
        from miles.run.cluster import train_on_ray

        return TrainedRun(target, train_on_ray(recipe, target, resume, view.message))
    if meeting is not None and recipe.run.parts is not None:
        from miles.run.ownlearn import learn_own

        return TrainedRun(target, learn_own(resolved, target, resume, view, meeting))
    if place is None and world_size(recipe) > 1:
        _check_sendable(recipe, rows, reward)
        from miles.run.together import train_on_ranks

        return TrainedRun(
            target, train_on_ranks(recipe, target, resume, view.message, env, "train" if collects else "learn")
        )
    from miles.run.here import train_here

    return TrainedRun(target, train_here(resolved, target, resume, view, place, rows, reward, env, meeting))


def _from_here(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _check_sendable(recipe: Recipe, rows: object, reward: object) -> None:
    if given := _given(rows, reward):
        raise ConfigError(
            f"{given[0]} is a Python object, and a run on {mesh(recipe)} with run.launcher = {recipe.run.launcher!r} starts "
            "processes of its own that do not have it: put it into a file (data.source = 'rows.jsonl', reward.functions = "
            "'file.py:function'), or train on one rank with run.launcher = 'local'"
        )


def _given(rows: object, reward: object) -> list[str]:
    return [key for key, value in (("data.source", rows), ("reward.functions", reward)) if value is not None]
