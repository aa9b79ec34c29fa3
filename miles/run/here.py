"""Trains a resolved recipe in this process, alone or as a rank: reads the inputs, joins the others, and writes the report."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from miles.errors import MilesError, TrainingAborted
from miles.observe.live import LiveView
from miles.observe.report import write_report
from miles.run.join import crew_of
from miles.run.lifeline import LIFELINE
from miles.run.local import FAILED_OUTSIDE_OF_UPDATES, LocalLauncher, device_of
from miles.run.logs import said
from miles.run.meeting import Meeting
from miles.run.place import Place
from miles.run.plan import check_device
from miles.run.prepare import RewardArgument, prepare
from miles.run.recipes import Resolved


def train_here(
    resolved: Resolved,
    run_dir: Path,
    resume: bool,
    view: LiveView,
    place: Place | None,
    rows: Iterable[Mapping[str, Any]] | None,
    reward: RewardArgument | None,
    environ: Mapping[str, str],
    meeting: Meeting | None = None,
) -> int:
    """The exit code. `meeting`: of a learner that does not collect. Raises MilesError."""
    recipe = resolved.recipe
    device = device_of(recipe, place)
    with said(view.message):
        inputs = prepare(recipe, resolved.row, rows=rows, reward=reward)
    if place is None or place.rank == 0:
        check_device(recipe, device)  # before ranks meet: a simulation is a process group of its own
    log = run_dir / "logs" / f"{'main' if place is None else place.name}.log"
    with crew_of(place, device, environ) as crew:
        launcher = LocalLauncher(
            recipe,
            resolved.row,
            inputs,
            run_dir,
            resume,
            view,
            crew,
            device,
            None if LIFELINE in environ else log,
            meeting,
        )
        try:
            code = launcher.launch()
        except (TrainingAborted, *FAILED_OUTSIDE_OF_UPDATES):
            if crew.leads:
                with contextlib.suppress(MilesError):  # of the two errors the first one counts
                    write_report(run_dir)
            raise
        if crew.leads:
            write_report(run_dir)
    return code
