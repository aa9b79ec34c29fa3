"""The reward model of a recipe: scores the answers of a group as one of the run's reward functions."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from miles.config.schema import Model, Recipe
from miles.env.answers import Answers
from miles.env.recorded import Exchange
from miles.env.template import Renderer
from miles.errors import RewardError
from miles.learn.load import (
    context_length,
    end_token_ids,
    load_config,
    load_generation_config,
    load_tokenizer,
    weights_hash,
)
from miles.learn.scorer import load_classifier, sequence_scores


class RewardModel:
    """`score(prompt, answer)` for each answer, each prompt and answer through the reward model's own tokenizer and template.

    The answers of one group are scored together and apart from all others, so a score does not depend on what else is
    scored at the time.
    """

    def __init__(self, recipe: Recipe, system_prompt: str | None) -> None:
        """Reads tokenizer and config; `system_prompt`: the task's own. Raises ModelError and DataError."""
        assert recipe.reward.model is not None
        self.folder = Path(recipe.reward.model).expanduser()
        section = Model(name=str(self.folder))
        tokenizer, config = load_tokenizer(section), load_config(section)
        renderer = Renderer(tokenizer, recipe.data, system_prompt=system_prompt)
        ends = end_token_ids(config, load_generation_config(section), tokenizer)
        self._answers = Answers(renderer, recipe.data, "answers", ends, scorer=True)
        self._context = context_length(config)
        self._model: PreTrainedModel | None = None
        self._one_at_a_time = threading.Lock()

    def load(self, device: torch.device | str) -> str:
        """Load the weights; their SHA-256. Raises ModelError."""
        self._model = load_classifier(self.folder, "reward.model").to(device)
        return weights_hash(self._model)

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str]) -> list[float]:
        if self._model is None:
            raise RewardError("the reward model has not been loaded")
        sequences = [self._sequence(p, c) for p, c in zip(prompts, completions, strict=True)]
        with self._one_at_a_time:
            return sequence_scores(self._model, sequences).tolist()

    def _sequence(self, prompt: Any, completion: str) -> list[int]:
        exchange = Exchange(prompt if isinstance(prompt, str) else tuple(prompt), completion)
        ids, _ = self._answers.whole(exchange)
        if self._context is not None and len(ids) > self._context:
            raise RewardError(
                f"a prompt and its answer have {len(ids)} tokens, more than the {self._context} that the reward model "
                f"{self.folder} reads: lower rollout.max_new_tokens or data.max_prompt_tokens"
            )
        return ids
