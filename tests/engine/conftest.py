"""Tiny models whose distributions are not flat, and an engine over each, for the tests of this folder."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from miles.engine.inprocess import InProcessEngine
from miles.learn.tiny import tiny_model, tiny_tokenizer


def _load(name: str) -> ModuleType:
    """A helper module beside this file: pytest imports no test folder as a package."""
    spec = importlib.util.spec_from_file_location(f"miles_engine_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


_load("contract")  # test modules of this folder find it in sys.modules
_load("behind")


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


@pytest.fixture(scope="session")
def fake_vllm() -> Any:
    """The class of `fake_vllm.py` beside this file."""
    return _load("fake_vllm").FakeVllm
