"""Everything of a run that can be checked before weights are loaded: tokenizer, rows, prompts, environment, rewards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from miles.algo import AlgorithmRow
from miles.config.schema import Recipe
from miles.env.answers import Answers, fit_answers
from miles.env.data import Dataset, load_rows
from miles.env.environment import SingleTurn, build_environment
from miles.env.heldout import split_held_out
from miles.env.reward import Rewards, build_rewards
from miles.env.tasks import Task
from miles.env.tasks import find as find_task
from miles.env.template import Renderer, fit_prompts, preview
from miles.errors import ConfigError
from miles.learn.load import context_length, end_token_ids, load_config, load_generation_config, load_tokenizer
from miles.protocols import Environment
from miles.run.reward_model import ReadForLearner, RewardModel, learner_reading
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
    answers: Answers | None = None  # recorded ones: nothing is sampled then, and no reward given
    reward_model: RewardModel | None = None

    @property
    def data_hash(self) -> str:
        """SHA-256 of the training rows, in order."""
        return self.train.content_hash

    def preview(self, n: int = 3) -> list[str]:
        if self.answers is not None:
            return [self.answers.shown(row) for row in self.train[:n]]
        return preview(self.train, self.renderer, n)


def prepare(
    recipe: Recipe,
    row: AlgorithmRow,
    *,
    rows: Iterable[Mapping[str, Any]] | None = None,
    reward: RewardArgument | None = None,
) -> Inputs:
    """Read and check the inputs; `rows` and `reward` replace the recipe's. Raises DataError, ConfigError, ModelError."""
    tokenizer, config = load_tokenizer(recipe.model), load_config(recipe.model)
    task = None if rows is not None else find_task(recipe.data.source)
    data = load_rows(recipe.data, rows=rows, task=task, seed=recipe.run.seed, form=row.data)
    renderer = Renderer(tokenizer, recipe.data, system_prompt=task.system_prompt if task else None)
    several = task is not None and task.max_turns > 1 and not row.recorded
    split = split_held_out(recipe.eval, recipe.data, data, task=task, seed=recipe.run.seed, whole_rows=several)
    ends = end_token_ids(config, load_generation_config(recipe.model), tokenizer)
    sampling = Sampling(recipe.rollout.max_new_tokens, recipe.rollout.temperature, ends, recipe.rollout.stop)
    inputs = Inputs(
        tokenizer, config, renderer, split.train, split.held_out, SingleTurn(renderer), Rewards(()), sampling,
        (split.message,),
    )  # fmt: skip
    inputs = _recorded(inputs, recipe, row) if row.recorded else _sampled(inputs, recipe, task, reward)
    if len(inputs.train) < recipe.algorithm.groups_per_step:
        raise ConfigError(
            f"algorithm.groups_per_step = {recipe.algorithm.groups_per_step} is more than the {len(inputs.train)} training rows "
            f"of {inputs.train.source}, and a prompt stands at most once in a step: lower it, or give more rows"
        )
    return inputs


def _recorded(inputs: Inputs, recipe: Recipe, row: AlgorithmRow) -> Inputs:
    """Rows whose answers are given, each rendered once to see that it can be."""
    section, context = recipe.data, context_length(inputs.config)
    answers = Answers(inputs.renderer, section, row.data, inputs.sampling.stop_token_ids, scorer=row.scorer)
    train, held_out, notes = _fitted(inputs, lambda data: fit_answers(data, answers, section, context=context))
    return replace(inputs, answers=answers, train=train, held_out=held_out, notes=notes)


def _sampled(inputs: Inputs, recipe: Recipe, task: Task | None, reward: RewardArgument | None) -> Inputs:
    """Rows whose answers an engine samples: what they are sampled in, and what scores them."""
    section, context = recipe.data, recipe.engine.context or context_length(inputs.config)
    environment, scores = build_environment(recipe, inputs.renderer, task=task, context=context)
    train, held_out, notes = _fitted(
        inputs,
        lambda data: fit_prompts(
            data, inputs.renderer, section, context=context, max_new_tokens=recipe.rollout.max_new_tokens
        ),
    )
    model, system_prompt = None, task.system_prompt if task else None
    later = recipe.reward.model is not None and recipe.reward.model_place == "learner"
    if later:
        reading = learner_reading(recipe, inputs.tokenizer, system_prompt)
        environment = ReadForLearner(environment, reading, section.prompt_column)
    elif recipe.reward.model is not None:
        model = RewardModel(recipe, system_prompt)
    rewards = build_rewards(
        recipe.reward, task=task, functions=reward, model=model, environment_scores=scores, more_later=later,
        prompt_column=section.prompt_column, source=train.source,
    )  # fmt: skip
    for data in (train, held_out):
        rewards.check_columns(data)
    return replace(
        inputs,
        environment=environment,
        rewards=rewards,
        reward_model=model,
        train=train,
        held_out=held_out,
        notes=notes,
    )


def _fitted(
    inputs: Inputs, fit: Callable[[Dataset], tuple[Dataset, str | None]]
) -> tuple[Dataset, Dataset, tuple[str, ...]]:
    """Training and held-out rows that fit, and what there is to tell."""
    train, train_note = fit(inputs.train)
    held_out, held_note = fit(inputs.held_out) if len(inputs.held_out) else (inputs.held_out, None)
    return train, held_out, tuple(note for note in (*inputs.notes, train_note, held_note) if note)
