"""What can be known of a run from its directory alone: recipe, rows, samples, and whether it has ended."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.errors import RunDirError
from miles.observe.rows import METRICS_FILE, SAMPLES_FILE, Row, eval_rows, read_rows, step_rows, value_of
from miles.observe.timeline import TIMELINE_FILE

CONFIG_FILE = "config.toml"
FINAL_FOLDER = "final"


@dataclass(frozen=True)
class RunData:
    """One reading of a run directory. `problems` says in sentences what could not be read."""

    run_dir: Path
    recipe_text: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[Row, ...] = ()
    evals: tuple[Row, ...] = ()
    samples: tuple[Row, ...] = ()
    timeline: tuple[Row, ...] = ()
    final_time: float | None = None  # seconds since the epoch at which final/ was written; None: it is not there
    problems: tuple[str, ...] = ()

    def setting(self, section: str, key: str) -> Any:
        """A key of the recipe; None where the recipe does not say."""
        table = self.recipe.get(section)
        return table.get(key) if isinstance(table, Mapping) else None

    @property
    def total_steps(self) -> int | None:
        steps = self.setting("algorithm", "steps")
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    @property
    def ended(self) -> bool:
        return has_ended(self.final_time, self.steps)

    @property
    def facts(self) -> dict[str, str]:
        """What the live view shows of a recipe, in order."""
        named = {
            "algorithm": self.setting("algorithm", "name"),
            "model": self.setting("model", "name"),
            "data": self.setting("data", "source"),
            "run": self.run_dir.name or self.run_dir.resolve().name,
        }
        return {name: str(value) for name, value in named.items() if value}


def read_run(run_dir: Path) -> RunData:
    """Reads what is there: a run that just started, runs, died or ended. Raises RunDirError where no run ever was."""
    if not run_dir.is_dir():
        raise RunDirError(f"there is no run directory {run_dir}: name the folder that `miles train --run` wrote")
    if not any((run_dir / name).exists() for name in (CONFIG_FILE, METRICS_FILE)):
        raise RunDirError(f"{run_dir} holds no run: it has neither {CONFIG_FILE} nor {METRICS_FILE}")
    recipe_text, recipe, problems = _read_recipe(run_dir / CONFIG_FILE)
    metrics, samples, timeline = (read_rows(run_dir / name) for name in (METRICS_FILE, SAMPLES_FILE, TIMELINE_FILE))
    for name, lines in ((METRICS_FILE, metrics), (SAMPLES_FILE, samples), (TIMELINE_FILE, timeline)):
        if lines.unreadable:
            numbers = ", ".join(map(str, lines.unreadable[:5])) + ("..." if len(lines.unreadable) > 5 else "")
            problems.append(f"{name}: {len(lines.unreadable)} line(s) could not be read and are left out ({numbers})")
    return RunData(
        run_dir=run_dir,
        recipe_text=recipe_text,
        recipe=recipe,
        steps=tuple(step_rows(metrics.rows)),
        evals=tuple(eval_rows(metrics.rows)),
        samples=tuple(samples.rows),
        timeline=tuple(timeline.rows),
        final_time=final_time(run_dir),
        problems=tuple(problems),
    )


def final_time(run_dir: Path) -> float | None:
    folder = run_dir / FINAL_FOLDER
    return folder.stat().st_mtime if folder.is_dir() else None


def has_ended(final: float | None, steps: Sequence[Row]) -> bool:
    """Whether final/ was written after the last step: a resumed run that goes on has an older one."""
    if final is None:
        return False
    last = value_of(steps[-1], "time") if steps else None
    return last is None or final >= last


def _read_recipe(path: Path) -> tuple[str, dict[str, Any], list[str]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return "", {}, [f"{CONFIG_FILE} is missing: the recipe cannot be shown"]
    try:
        return text, tomllib.loads(text), []
    except tomllib.TOMLDecodeError as error:
        return text, {}, [f"{CONFIG_FILE} is no valid TOML ({error}): facts from the recipe are left out"]
