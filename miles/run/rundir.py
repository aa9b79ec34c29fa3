"""The run directory: a fresh one, or the one that is resumed with a recipe that may differ in a few keys only."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from miles.buffer.place import LOCK_NAME, RunLock
from miles.config.load import load
from miles.config.names import is_text
from miles.config.schema import Recipe
from miles.config.toml import dump_toml
from miles.errors import RunDirError

CONFIG_FILE = "config.toml"
RECIPE, DATA = "recipe", "training rows"
"""Keys of a run's identity: `fixed_hash`, and the hash of the rows that the run trains on."""
PART = CONFIG_FILE + ".part"
FREE_SECTIONS = ("run", "log", "eval", "parallel")
FREE_KEYS = (
    "algorithm.steps", "learner.tokens_per_microbatch", "buffer.url", "buffer.token_file", "buffer.ca_file",
    "buffer.min_free_mb", "publish.directory", "engine.url", "engine.token_file", "engine.ca_file",
)  # fmt: skip
FIXED_KEYS = ("run.seed", "run.parts")  # everything random follows from it
FROM_PYTHON = ("data.source", "reward.functions")  # a run started from Python may have objects in their place


def default_run_dir(recipe_name: str) -> Path:
    """runs/<recipe>-<time>, numbered when two runs start within one second."""
    base = Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [base, *(base.with_name(f"{base.name}-{i}") for i in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def check_run_dir(run_dir: Path, recipe: Recipe, resume: bool) -> None:
    """The directory is free, or holds the run that is to be resumed. Raises RunDirError; writes nothing."""
    if not is_text(str(run_dir)) or "\0" in str(run_dir):
        raise RunDirError(f"--run {str(run_dir)!a} is not a name in UTF-8 that a folder can have: name another")
    try:
        _check_run_dir(run_dir, recipe, resume)
    except OSError as error:  # a name that is too long, a folder that may not be looked into
        raise _unwritable(run_dir, error) from error


def _check_run_dir(run_dir: Path, recipe: Recipe, resume: bool) -> None:
    if resume:
        if not (run_dir / CONFIG_FILE).exists():
            raise RunDirError(f"--resume: {run_dir} holds no {CONFIG_FILE}, so no run to resume; leave --resume out")
        _same_run(run_dir, recipe)
    else:
        _check_free(run_dir)
    _check_writable(run_dir)


def write_config(run_dir: Path, recipe: Recipe) -> None:
    """Write the resolved recipe into the directory, whole or not at all. Raises RunDirError."""
    config = run_dir / CONFIG_FILE
    try:
        part = run_dir / PART
        part.write_text(dump_toml(recipe), encoding="utf-8")
        part.replace(config)
    except OSError as error:
        raise _unwritable(config, error) from error


def begin_run_dir(run_dir: Path, recipe: Recipe) -> None:
    """Make the directory of a new run, with its recipe. Raises RunDirError, also where another process was faster."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    lock = RunLock(run_dir)
    try:
        _check_free(run_dir)
        write_config(run_dir, recipe)
    finally:
        lock.release()


def stored_recipe(run_dir: Path) -> Recipe:
    """The resolved recipe of a run directory. Raises RunDirError."""
    config = run_dir / CONFIG_FILE
    if not config.exists():
        raise RunDirError(f"{run_dir} is no run directory: it has no {CONFIG_FILE}")
    loaded = load([config], {}, env={}, rows=None, given=FROM_PYTHON)
    if loaded.problems:
        about_the_file = [problem for problem in loaded.problems if str(config) in problem]
        raise RunDirError(
            f"{config} is not the recipe that Miles wrote: {' '.join(about_the_file or loaded.problems)} Put back what stood "
            "there (`miles check` prints the whole recipe of a file)."
        )
    return loaded.recipe


def fixed_hash(recipe: Recipe) -> str:
    """Hash of every key that a resumed run must have in common with its beginning."""
    fixed = {key: value for key, value in _flat(recipe.model_dump(mode="json")) if not _free(key)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def _same_run(run_dir: Path, recipe: Recipe) -> None:
    before = dict(_flat(stored_recipe(run_dir).model_dump(mode="json")))
    now = dict(_flat(recipe.model_dump(mode="json")))
    changed = [key for key in now if not _free(key) and before.get(key) != now[key]]
    if changed:
        listed = "; ".join(f"{key} was {before.get(key)!r} and is now {now[key]!r}" for key in changed)
        free = ", ".join([*FREE_KEYS, *(f"[{section}]" for section in FREE_SECTIONS)])
        free += f" (without {', '.join(FIXED_KEYS)})"
        raise RunDirError(
            f"--resume: {run_dir} holds a run with other settings: {listed}. Only {free} may change; "
            "set the others back, or start a new run in another directory"
        )


def _free(key: str) -> bool:
    return key in FREE_KEYS or (key.split(".")[0] in FREE_SECTIONS and key not in FIXED_KEYS)


def _check_free(run_dir: Path) -> None:
    if run_dir.exists() and not run_dir.is_dir():
        raise RunDirError(f"--run {run_dir} is a file: name a directory that is empty or does not exist yet")
    # The lock, and half a recipe that a killed process left, are nobody's work.
    if run_dir.exists() and any(path.name not in (PART, LOCK_NAME) for path in run_dir.iterdir()):
        raise RunDirError(f"--run {run_dir} is not empty: continue its run with --resume, or name another directory")


def _unwritable(path: Path, error: OSError) -> RunDirError:
    return RunDirError(f"cannot write {path}: {error.strerror or error}; choose another --run directory")


def _check_writable(run_dir: Path) -> None:
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if path.exists())
    if not there.is_dir():
        raise RunDirError(f"--run {run_dir} cannot be made: {there} is a file; name another directory")
    if not os.access(there, os.W_OK | os.X_OK):
        raise RunDirError(f"--run {run_dir} cannot be written: {there} is read-only; name another directory")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
