"""Tiny models whose distributions are not flat, and an engine over each, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from miles.engine.inprocess import InProcessEngine
from miles.learn.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def peaked() -> Callable[..., Any]:
    """`peaked(family, tied, **config keys)`: a tiny random model whose next-token entropy is well below uniform."""

    def make(family: str = "llama", tied: bool = False, **keys: Any) -> Any:
        model = tiny_model(family, tied, **keys)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4)
        return model

    return make


@pytest.fixture
def engine_of() -> Callable[..., InProcessEngine]:
    """`engine_of(model, **keys)`: an engine at version 3 without end tokens."""

    def make(model: Any, **keys: Any) -> InProcessEngine:
        return InProcessEngine(model, tiny_tokenizer(), **{"version": lambda: 3, "end_token_ids": (), **keys})

    return make
