from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from miles.learn.tiny import CONTEXT, tiny_tokenizer

_SPEC = importlib.util.spec_from_file_location("miles_engine_contract", Path(__file__).with_name("contract.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
contract = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = contract
_SPEC.loader.exec_module(contract)


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
