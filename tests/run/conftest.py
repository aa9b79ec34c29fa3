"""Tiny runs for the tests of this folder: by the command line in this process, or in processes that may be killed."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import runpy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles.__main__ import main

TINY = """
[model]
name = "tiny-random:llama"
[data]
source = "task:echo_digit"
[rollout]
group_size = 4
max_new_tokens = 4
[algorithm]
name = "grpo"
steps = 2
groups_per_step = 4
[learner]
learning_rate = 3e-3
[eval]
rows = 0
[run]
threads = 1
[log]
live = "off"
"""

REWARDS = '''
"""Rewards that differ within most groups; the call KILL_AT of a process ends it by the signal KILL_WITH."""

import itertools
import os

calls = itertools.count(1)


def reward(prompts, completions, **columns):
    if next(calls) == int(os.environ.get("KILL_AT", 0)):
        os.kill(os.getpid(), int(os.environ["KILL_WITH"]))
    return [float(sum(map(ord, text)) % 3) for text in completions]


def half(prompts, completions, **columns):
    return [float(i % 2) for i in range(len(completions))]
'''

MEASURED = ("time", "throughput", "memory")  # of this machine at this moment


@dataclass(frozen=True)
class Ended:
    """How a command ended. `out` holds both streams where it ran in a process of its own."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """The error, which is one paragraph and no traceback."""
        assert "Traceback" not in self.out + self.err, self.out + self.err
        assert self.err.startswith("miles: "), self.err
        return self.err


class Runs:
    """Runs of one tiny recipe in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "tiny.toml"
        self.recipe.write_text(TINY, encoding="utf-8")
        self.rewards = folder / "rewards.py"
        self.rewards.write_text(REWARDS, encoding="utf-8")

    def arguments(self, name: str, changes: Mapping[str, Any], resume: bool = False) -> list[str]:
        given = {"reward.functions": [f"{self.rewards}:reward"], **changes}
        options = [f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given.items()]
        return ["train", str(self.recipe), *options, "--run", str(self.folder / name), *["--resume"] * resume]

    def train(self, name: str = "run", *, resume: bool = False, **changes: Any) -> Ended:
        """Trains in this process. Keys of the recipe have `__` for their dot."""
        return command(*self.arguments(name, dotted(changes), resume))

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


def dotted(changes: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("__", "."): value for key, value in changes.items()}


def command(*arguments: str) -> Ended:
    """One command of `miles` in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    return Ended(code, out.getvalue(), err.getvalue())


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, as far as two equal runs have them in common."""
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{key: value for key, value in row.items() if key.partition("/")[0] not in MEASURED} for row in found]


def same_run(one: Path, other: Path) -> None:
    """Metrics, samples and final weights are equal, to the bit."""
    assert rows(one) == rows(other)
    final = "adapter_model" if (one / "final" / "adapter_model.safetensors").exists() else "model"
    for name in ("samples.jsonl", f"final/{final}.safetensors"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


class Processes:
    """Starts commands in processes of their own, forked from one that has loaded everything already."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["miles.run.train"])
        self._child = str(Path(__file__).with_name("child.py"))

    def start(self, arguments: list[str], log: Path, **job: Any) -> multiprocessing.process.BaseProcess:
        """`job`: cwd, environ (changes), file_limit (bytes that a file may have), closed (numbers of output streams)."""
        given = {"job": {"arguments": arguments, "log": str(log), **job}}
        process = self._context.Process(target=runpy.run_path, args=(self._child,), kwargs={"init_globals": given})
        process.start()
        return process

    def run(self, arguments: list[str], log: Path, **job: Any) -> Ended:
        process = self.start(arguments, log, **job)
        process.join(120)
        assert process.exitcode is not None
        text = log.read_text(encoding="utf-8")
        error = text[text.rindex("miles: ") :] if "miles: " in text else ""
        return Ended(process.exitcode, text, error)


@dataclass(frozen=True)
class Tools:
    """What tests need beside fixtures; test modules cannot import each other."""

    command: Callable[..., Ended]
    rows: Callable[[Path], list[dict[str, Any]]]
    same_run: Callable[[Path, Path], None]
    runs: Callable[[Path], Runs]


@pytest.fixture(scope="session")
def tools() -> Tools:
    return Tools(command, rows, same_run, Runs)


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(scope="session")
def processes() -> Processes:
    return Processes()
