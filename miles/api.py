"""The Python face of Miles: `miles.train(model=..., data=rows, reward=f, algorithm="grpo", steps=50)`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from miles.errors import BadInput

if TYPE_CHECKING:
    from miles.run.prepare import RewardArgument
    from miles.run.train import TrainedRun

NAMED = {
    "model": "model.name", "algorithm": "algorithm.name", "steps": "algorithm.steps", "data": "data.source",
}  # fmt: skip


def train(
    *,
    model: str | Path | None = None,
    data: str | Path | Iterable[Mapping[str, Any]] | None = None,
    reward: RewardArgument | None = None,
    algorithm: str | None = None,
    steps: int | None = None,
    recipe: str | Path | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    **settings: Any,
) -> TrainedRun:
    """Train in this process and return the finished run (`.metrics`, `.model_dir`, `.run_dir`). Works in a notebook too.

    `model`: hub id or folder. `data`: as `data.source`, or rows with `prompt` (text or chat messages) and any further
    columns. `reward`: a function `(prompts, completions, **columns) -> list[float | None]`, sync or async, or several;
    None: the task's own or the recipe's. `recipe`: a TOML file below all of these. Further keys of the recipe go by
    their dotted name: `train(..., **{"rollout.group_size": 16})`. Raises MilesError, and KeyboardInterrupt after Ctrl-C or
    SIGTERM, once a checkpoint is on disk: `resume=True` with the same `run_dir` goes on from it.
    """
    from miles.run.threads import prepare_process

    prepare_process()
    from miles.run.interrupts import Interrupted
    from miles.run.train import start_run

    source = str(data) if isinstance(data, str | Path) else None
    given = {"model": str(model) if model is not None else None, "algorithm": algorithm, "steps": steps, "data": source}
    overrides = {NAMED[name]: value for name, value in given.items() if value is not None} | settings
    rows = data if source is None else None
    recipes = [Path(recipe)] if recipe is not None else []
    target = Path(run_dir) if run_dir is not None else None
    if run_dir is not None and not str(run_dir):
        raise BadInput("miles.train: run_dir is an empty text, where the name of a folder is meant")
    if resume and target is None:
        raise BadInput("miles.train: resume=True needs run_dir, the folder of the run that is to go on")
    run = start_run(
        recipes, overrides, target, resume, rows=rows, reward=reward, overrides_from="miles.train"
    )  # fmt: skip
    if run.exit_code:
        raise Interrupted(run.exit_code - 128)
    return run
