"""A look at the data and the built-in rewards that a recipe names, by the readers that training uses, before any model loads."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, MutableMapping

from miles.config.names import is_hub_id
from miles.config.schema import Recipe
from miles.env.data import Dataset, load_rows
from miles.env.heldout import Split, split_held_out
from miles.env.reward import build_rewards
from miles.env.tasks import Task
from miles.env.tasks import find as find_task
from miles.env.verifiers import LIBRARY
from miles.errors import BadInput


def read_data(
    recipe: Recipe, facts: MutableMapping[str, str], given: Collection[str] = (), form: str = "prompts"
) -> list[str]:
    """One sentence for each thing in the data that stops the run; what stands there goes into `facts`.

    Reads as many rows as one step and the evaluation need, and nothing from the hub. `given` names keys that Python
    objects replace; `form`: what rows must hold for the algorithm.
    """
    problems = [text for key in ("data.source", "eval.source") for text in _missing_extra(recipe, key)]
    if "data.source" in given or not recipe.data.source or is_hub_id(recipe.data.source):
        return problems
    try:
        task = find_task(recipe.data.source)
        data, whole = _first_rows(recipe, task, form)
        facts["data.source"] = f"{'' if whole else 'at least '}{len(data)} rows with {', '.join(data[0])}"
        if whole and not problems:
            problems += _too_few(recipe, _split(recipe, data, task))
        if form == "prompts":
            problems += _reward_columns(recipe, data, task, given)
    except BadInput as error:
        problems.append(str(error))
    return problems


def _missing_extra(recipe: Recipe, key: str) -> Iterator[str]:
    source = recipe.data.source if key == "data.source" else recipe.eval.source or ""
    if is_hub_id(source) and importlib.util.find_spec("datasets") is None:
        yield (
            f"{key} = {source} is no file here, and the hub needs the package datasets: "
            "pip install 'miles-rl[data]', or give a .jsonl, .parquet or .csv file."
        )


def _first_rows(recipe: Recipe, task: Task | None, form: str) -> tuple[Dataset, bool]:
    """Rows enough to judge by, and whether these are all."""
    most = recipe.data.max_rows
    enough = recipe.algorithm.groups_per_step + recipe.eval.rows + 1
    if task is not None or (most is not None and most <= enough):
        return load_rows(recipe.data, task=task, seed=recipe.run.seed, form=form), True
    data = load_rows(recipe.data.model_copy(update={"max_rows": enough}), form=form)
    return data, len(data) < enough


def _split(recipe: Recipe, data: Dataset, task: Task | None) -> Split:
    if recipe.eval.source is not None and is_hub_id(recipe.eval.source):
        return Split(data, data.only(()), "held-out rows from the hub")
    return split_held_out(recipe.eval, recipe.data, data, task=task, seed=recipe.run.seed)


def _too_few(recipe: Recipe, split: Split) -> Iterator[str]:
    rows, groups = len(split.train), recipe.algorithm.groups_per_step
    if rows < groups:
        held_out = f", beside {len(split.held_out)} held-out ones (eval.rows)" if len(split.held_out) else ""
        yield (
            f"algorithm.groups_per_step = {groups} is more than the {rows} rows of {split.train.source}{held_out}, and a prompt "
            f"stands at most once in a step: lower it to at most {rows}, or give more rows."
        )


def _reward_columns(recipe: Recipe, data: Dataset, task: Task | None, given: Collection[str]) -> list[str]:
    """Built-in rewards alone: a user's file is imported by training, not by a check."""
    turns = recipe.rollout.environment or (task.name if task is not None and task.dialogue is not None else None)
    if recipe.reward.model is not None and turns is not None:
        return [
            f"reward.model scores one answer to one prompt, and {turns} may have several turns: leave one of them out."
        ]
    if "reward.functions" in given or not set(recipe.reward.functions) <= set(LIBRARY):
        return []
    if recipe.reward.weights and len(recipe.reward.weights) != len(recipe.reward.functions):
        return []  # a rule says so
    scores = recipe.rollout.environment is not None or (task is not None and hasattr(task.dialogue, "reward"))
    try:
        modelled = recipe.reward.model is not None
        rewards = build_rewards(
            recipe.reward, task=task, environment_scores=scores, more_later=modelled, source=data.source
        )
        rewards.check_columns(data)
    except BadInput as error:
        return [str(error)]
    return []
