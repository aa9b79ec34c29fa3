"""Gives the tests of this folder hand-made groups and a plain reading of them."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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


class Gang:
    """Runs a function of a test module on several gloo ranks at once, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed.tensor", "miles.learn.learner", "miles.learn.writer"])
        self._calls = 0

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What each rank returned, in the order of ranks; arguments and results are JSON."""
        self._calls += 1
        place = self._folder / f"gang-{self._calls}"
        place.mkdir()
        processes = [self._start(place, size, rank, function, arguments) for rank in range(size)]
        for process in processes:
            process.join(120)
            process.kill()
        assert [process.exitcode for process in processes] == [0] * size
        return [json.loads((place / f"result-{rank}").read_text(encoding="utf-8")) for rank in range(size)]

    def _start(self, place: Path, size: int, rank: int, function: Callable[..., Any], arguments: Any) -> Any:
        job = {
            "size": size, "rank": rank, "module": function.__code__.co_filename, "function": function.__name__,
            "arguments": arguments, "store": str(place / "store"), "result": str(place / f"result-{rank}"),
        }  # fmt: skip
        child = str(Path(__file__).with_name("gang_child.py"))
        process = self._context.Process(target=runpy.run_path, args=(child,), kwargs={"init_globals": {"job": job}})
        process.start()
        return process


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return Gang(tmp_path)
