"""Everything of a run that can be checked before weights are loaded: tokenizer, rows, prompts, environment, rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from miles.config.schema import Recipe
from miles.env.data import Dataset, load_rows
from miles.env.environment import build_environment
from miles.env.heldout import split_held_out
from miles.env.reward import Rewards, build_rewards
from miles.env.tasks import find as find_task
from miles.env.template import Renderer, fit_prompts, preview
from miles.errors import ConfigError
from miles.learn.load import context_length, end_token_ids, load_config, load_generation_config, load_tokenizer
from miles.protocols import Environment
from miles.types import Sampling

RewardArgument = Callable[..., Any] | str | Sequence[Callable[..., Any] | str]


@dataclass(frozen=True)
class Inputs:
    """What a run reads, ready to use."""

    tokenizer: PreTrainedTokenizerBase
    config: PreTrainedConfig
    renderer: Renderer
    train: Dataset
    held_out: Dataset
    environment: Environment
    rewards: Rewards
    sampling: Sampling
    notes: tuple[str, ...]  # what the user should know about the data

    @property
    def data_hash(self) -> str:
        """SHA-256 of the training rows, in order."""
        return self.train.content_hash

    def preview(self, n: int = 3) -> list[str]:
        return preview(self.train, self.renderer, n)


def prepare(
    recipe: Recipe, *, rows: Iterable[Mapping[str, Any]] | None = None, reward: RewardArgument | None = None
) -> Inputs:
    """Read and check the inputs; `rows` and `reward` replace the recipe's. Raises DataError, ConfigError, ModelError."""
    tokenizer = load_tokenizer(recipe.model)
    config = load_config(recipe.model)
    task = None if rows is not None else find_task(recipe.data.source)
    data = load_rows(recipe.data, rows=rows, task=task, seed=recipe.run.seed)
    renderer = Renderer(tokenizer, recipe.data, system_prompt=task.system_prompt if task else None)
    context, new_tokens = recipe.engine.context or context_length(config), recipe.rollout.max_new_tokens
    environment, scores = build_environment(recipe, renderer, task=task, context=context)
    split = split_held_out(
        recipe.eval,
        recipe.data,
        data,
        task=task,
        seed=recipe.run.seed,
        whole_rows=task is not None and task.max_turns > 1,
    )
    train, train_note = fit_prompts(split.train, renderer, recipe.data, context=context, max_new_tokens=new_tokens)
    held_out, held_note = split.held_out, None
    if len(held_out):
        held_out, held_note = fit_prompts(held_out, renderer, recipe.data, context=context, max_new_tokens=new_tokens)
    rewards = build_rewards(
        recipe.reward, task=task, functions=reward, environment_scores=scores, prompt_column=recipe.data.prompt_column,
        source=train.source,
    )  # fmt: skip
    for data in (train, held_out):
        rewards.check_columns(data)
    if len(train) < recipe.algorithm.groups_per_step:
        raise ConfigError(
            f"algorithm.groups_per_step = {recipe.algorithm.groups_per_step} is more than the {len(train)} training rows of "
            f"{train.source}, and a prompt stands at most once in a step: lower it, or give more rows"
        )
    ends = end_token_ids(config, load_generation_config(recipe.model), tokenizer)
    sampling = Sampling(new_tokens, recipe.rollout.temperature, ends, recipe.rollout.stop)
    notes = tuple(note for note in (split.message, train_note, held_note) if note)
    return Inputs(tokenizer, config, renderer, train, held_out, environment, rewards, sampling, notes)
