from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from miles.learn.tiny import CONTEXT, tiny_tokenizer

contract = sys.modules["miles_engine_contract"]  # loaded by conftest.py


class TestInProcessEngine(contract.EngineContract):
    @pytest.fixture
    def bench(self, peaked: Callable[..., Any], engine_of: Callable[..., Any]) -> Any:
        model = peaked("llama")
        return contract.Bench(model, tiny_tokenizer(), partial(engine_of, model), CONTEXT)


class TestInProcessEngineWithoutDeterminism(contract.EngineContract):
    @pytest.fixture
    def bench(self, peaked: Callable[..., Any], engine_of: Callable[..., Any]) -> Any:
        model = peaked("llama")
        make = partial(engine_of, model, deterministic=False)
        return contract.Bench(model, tiny_tokenizer(), make, CONTEXT, deterministic=False)
