"""An engine and a learner of one's own behind Miles's buffer, loop, collectors and launcher: `run.parts`. Imports no torch.

The object that `run.parts` names is called with the recipe and gives `Parts`: each process asks it for the half that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from miles.algo.userfile import load_object
from miles.config.schema import Recipe
from miles.env.data import Dataset, load_rows
from miles.env.environment import build_environment
from miles.env.heldout import split_held_out
from miles.env.reward import build_rewards
from miles.env.tasks import find as find_task
from miles.env.template import Renderer, fit_prompts
from miles.protocols import Engine, Learner, Publisher
from miles.rollout.episode import Episodes
from miles.run.recipes import Resolved
from miles.types import Sampling

KEY = "run.parts"


class OwnLearner(Learner, Protocol):
    """A learner, and what its checkpoints hold."""

    def state(self) -> bytes:
        """All that a resumed run needs to go on with equal bits."""
        ...

    def load_state(self, state: bytes) -> None:
        """Continue from what `state` returned."""
        ...


class Parts(Protocol):
    """What `run.parts` gives."""

    tokenizer: Any  # as Hugging Face's: of the engine and the learner
    vocabulary: int  # token ids are below it

    def engine(self) -> Engine:
        """For a collector; new weights reach it in whatever way the publisher sends them."""
        ...

    def learner(self) -> OwnLearner: ...

    def publisher(self) -> Publisher: ...


@dataclass(frozen=True)
class Making:
    """The rows, and what makes the group of each."""

    rows: Sequence[Mapping[str, Any]]
    data_hash: str
    groups: Episodes
    vocabulary: int  # token ids are below it


def own_parts(recipe: Recipe) -> Parts:
    """Raises ConfigError where there is no such object."""
    assert recipe.run.parts is not None
    return load_object(recipe.run.parts, KEY)(recipe)


def own_rows(resolved: Resolved, parts: Parts) -> tuple[Dataset, Renderer]:
    """The training rows whose prompts fit. Raises DataError and ConfigError."""
    recipe, task = resolved.recipe, find_task(resolved.recipe.data.source)
    data = load_rows(recipe.data, task=task, seed=recipe.run.seed, form=resolved.row.data)
    renderer = Renderer(parts.tokenizer, recipe.data, system_prompt=task.system_prompt if task else None)
    rows = split_held_out(recipe.eval, recipe.data, data, task=task, seed=recipe.run.seed).train
    context, new = recipe.engine.context, recipe.rollout.max_new_tokens
    return fit_prompts(rows, renderer, recipe.data, context=context, max_new_tokens=new)[0], renderer


def own_groups(resolved: Resolved) -> Making:
    """With the engine of one's own, in Miles's environments and with its rewards."""
    recipe, task = resolved.recipe, find_task(resolved.recipe.data.source)
    parts = own_parts(recipe)
    rows, renderer = own_rows(resolved, parts)
    environment, scores = build_environment(recipe, renderer, task=task, context=recipe.engine.context)
    rewards = build_rewards(
        recipe.reward, task=task, environment_scores=scores, prompt_column=recipe.data.prompt_column, source=rows.source
    )
    rewards.check_columns(rows)
    sampling = Sampling(recipe.rollout.max_new_tokens, recipe.rollout.temperature, (), recipe.rollout.stop)
    episodes = Episodes(environment, parts.engine(), rewards, sampling, renderer.text)
    return Making(rows, rows.content_hash, episodes, parts.vocabulary)
