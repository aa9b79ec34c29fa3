"""From recipe files, environment and command line to one recipe that everything agrees to, or to every objection at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from miles import algo
from miles.config.headers import read_headers, reference_problems
from miles.config.load import COMMAND_LINE, Loaded, load, placed, without
from miles.config.names import split_reference
from miles.config.rules import rule_warnings
from miles.config.schema import Recipe
from miles.env.verifiers import LIBRARY
from miles.errors import BadInput, ConfigError
from miles.observe.sinks import missing_trackers
from miles.run.cluster import missing_launcher
from miles.run.inputs import read_data
from miles.run.place import Machines

SAMPLED = ("rollout.", "engine.", "reward.", "eval.samples", "eval.greedy")
"""Keys, or their beginnings, that say how answers are sampled and scored."""


@dataclass(frozen=True)
class Resolved:
    """A recipe without problems, and what `miles check` shows beside it."""

    recipe: Recipe
    row: algo.AlgorithmRow
    origins: Mapping[str, str]  # dotted key -> the layer that set it; defaults are absent
    facts: Mapping[str, str]  # dotted key -> what the named file holds
    warnings: list[str]  # one sentence each


def resolve(
    paths: Sequence[Path],
    overrides: Mapping[str, Any],
    env: Mapping[str, str],
    *,
    given: Collection[str] = (),
    overrides_from: str = COMMAND_LINE,
) -> Recipe:
    """The recipe of all layers. Raises ConfigError with every problem of schema, rules, files and algorithm."""
    return inspect(paths, overrides, env, given=given, overrides_from=overrides_from).recipe


def inspect(
    paths: Sequence[Path],
    overrides: Mapping[str, Any],
    env: Mapping[str, str],
    *,
    given: Collection[str] = (),
    overrides_from: str = COMMAND_LINE,
) -> Resolved:
    """As `resolve`, with warnings, origins and what the headers of model and data say.

    `given` names keys that Python objects stand for (`data.source` for rows, `reward.functions` for a function, ...).
    """
    find = cache(_find)
    loaded = load(paths, overrides, env=env, rows=find, given=given, overrides_from=overrides_from)
    row = _or_none(find, loaded.recipe.algorithm.name)
    headers = read_headers(loaded.recipe, given, LIBRARY, scorer=row is not None and row.scorer)
    form = "prompts" if row is None else row.data
    objections = headers.problems + read_data(loaded.recipe, headers.facts, given, form)
    objections += [*missing_trackers(loaded.recipe.log), *missing_launcher(loaded.recipe)]
    if row is not None:
        objections += algo.problems(row, loaded.recipe)
    problems = loaded.problems + [placed(text, loaded.origins) for text in without(loaded.refused, objections)]
    if problems or row is None:
        raise ConfigError(list(dict.fromkeys(problems)))
    return _resolved(loaded, headers.facts, row, given, env)


def _resolved(
    loaded: Loaded, facts: Mapping[str, str], row: algo.AlgorithmRow, given: Collection[str], env: Mapping[str, str]
) -> Resolved:
    recipe = loaded.recipe
    if recipe.run.threads is None:
        share = max(1, _cores() // Machines.of(recipe, env).per_machine)
        threads = recipe.run.model_copy(update={"threads": share})
        recipe = recipe.model_copy(update={"run": threads})
    chosen = [key for key, origin in loaded.origins.items() if not origin.startswith("row ")]
    warnings = rule_warnings(recipe, chosen, given) + algo.warnings(row, recipe)
    if row.recorded:
        idle = [key for key in chosen if key.startswith(SAMPLED)]
        warnings += [
            f"{key} has no effect: {row.name} learns from recorded answers and samples nothing." for key in idle
        ]
    return Resolved(recipe, row, loaded.origins, facts, warnings)


def _find(name: str) -> algo.AlgorithmRow:
    """The row of that name; a user's file is looked at before it is imported."""
    if split_reference(name) is not None and (problems := list(reference_problems("algorithm.name", name))):
        raise ConfigError(problems)
    return algo.find(name)


def _or_none(find: Callable[[str], algo.AlgorithmRow], name: str) -> algo.AlgorithmRow | None:
    try:
        return find(name)
    except BadInput:
        return None


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
