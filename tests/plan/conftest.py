"""Recipes and configs of tiny models for the planner."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from miles.config.schema import Recipe
from miles.run.recipes import resolve

BASE = {
    "model.name": "tiny-random:llama-untied",
    "data.source": "task:addition",
    "data.max_prompt_tokens": 24,
    "rollout.max_new_tokens": 16,
    "rollout.group_size": 4,
    "algorithm.groups_per_step": 4,
    "algorithm.steps": 1,
    "learner.tokens_per_microbatch": 128,
}


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    """A recipe; keys are dotted names with two underscores for the dot."""

    def make(**keys: Any) -> Recipe:
        return resolve([], {**BASE, **{key.replace("__", "."): value for key, value in keys.items()}}, {})

    return make
