"""The reward model of a recipe: scores the answers of a group as one of the run's reward functions, or is read for by the learner's."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from miles.config.schema import Model, Recipe
from miles.env.answers import SCORED, Answers
from miles.env.recorded import Exchange
from miles.env.template import Renderer
from miles.errors import ModelError, RewardError
from miles.learn.judge import READS
from miles.learn.load import (
    context_length,
    end_token_ids,
    load_config,
    load_generation_config,
    load_tokenizer,
    weights_hash,
)
from miles.learn.scorer import load_classifier, sequence_scores
from miles.protocols import Engine, Environment
from miles.types import Sample, Sampling


class Reading:
    """What a reward model reads of a prompt and an answer, through its own tokenizer and template."""

    def __init__(self, section: Model, recipe: Recipe, system_prompt: str | None) -> None:
        """`section`: the folder of its tokenizer and config; `system_prompt`: the task's own. Raises ModelError and DataError."""
        self.tokenizer, config = load_tokenizer(section), load_config(section)
        renderer = Renderer(self.tokenizer, recipe.data, system_prompt=system_prompt)
        ends = end_token_ids(config, load_generation_config(section), self.tokenizer)
        self._answers = Answers(renderer, recipe.data, "answers", ends, scorer=True)
        self._context = context_length(config)
        self._name = recipe.reward.model

    def ids(self, prompt: Any, completion: str) -> list[int]:
        """Raises RewardError where they are longer than the model reads."""
        exchange = Exchange(prompt if isinstance(prompt, str) else tuple(prompt), completion)
        ids, _ = self._answers.whole(exchange)
        if self._context is not None and len(ids) > self._context:
            raise RewardError(
                f"a prompt and its answer have {len(ids)} tokens, more than the {self._context} that the reward model "
                f"{self._name} reads: lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        return ids


class RewardModel:
    """`score(prompt, answer)` for each answer, by a model of its own.

    The answers of one group are scored together and apart from all others, so a score does not depend on what else is
    scored at the time.
    """

    def __init__(self, recipe: Recipe, system_prompt: str | None) -> None:
        """As `Reading`."""
        assert recipe.reward.model is not None
        self.folder = Path(recipe.reward.model).expanduser()
        self._reading = Reading(Model(name=str(self.folder)), recipe, system_prompt)
        self._model: PreTrainedModel | None = None
        self._one_at_a_time = threading.Lock()

    def load(self, device: torch.device | str) -> str:
        """Load the weights; their SHA-256. Raises ModelError."""
        self._model = load_classifier(self.folder, "reward.model").to(device)
        return weights_hash(self._model)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        if self._model is None:
            raise RewardError("the reward model has not been loaded")
        sequences = [self._reading.ids(p, c) for p, c in zip(prompts, completions, strict=True)]
        with self._one_at_a_time:
            return sequence_scores(self._model, sequences).tolist()


class ReadForLearner:
    """An environment whose samples carry what the learner's reward model will read of them."""

    def __init__(self, environment: Environment, reading: Reading, prompt_column: str) -> None:
        self._environment, self._reading, self._column = environment, reading, prompt_column

    async def episodes(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        samples = await self._environment.episodes(row, engine, sampling, seeds)
        return [replace(sample, extras={**sample.extras, READS: self._read(row, sample)}) for sample in samples]

    def _read(self, row: Mapping[str, Any], sample: Sample) -> list[int]:
        return [*self._reading.ids(row[self._column], sample.text), SCORED]


def learner_reading(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> Reading:
    """What a reward model on the learner's base reads; `tokenizer`: the policy's. Raises ModelError where it reads other ids."""
    assert recipe.reward.model is not None
    folder = Path(recipe.reward.model).expanduser()
    whole = (folder / "config.json").is_file()
    reading = Reading(Model(name=str(folder)) if whole else recipe.model, recipe, system_prompt)
    if reading.tokenizer.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"reward.model = {recipe.reward.model} has another vocabulary than model.name = {recipe.model.name}, on whose base it "
            "is to score: give one that was trained on this base, or leave reward.model_place out."
        )
    return reading
