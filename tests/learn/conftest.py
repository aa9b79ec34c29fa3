"""Gives the tests of this folder hand-made groups and a plain reading of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def groups() -> ModuleType:
    name = "miles_learn_groups"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("groups.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module
