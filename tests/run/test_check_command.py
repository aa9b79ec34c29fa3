"""`miles check`: the tree that it prints is a recipe, the world map says who runs where, and nothing heavy is imported."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from miles.run.check import check_command, world_map
from miles.run.recipes import inspect

BASE = {"model.name": "tiny-random:llama", "data.source": "task:addition", "algorithm.steps": 4}

LIGHT = """
import sys
before = set(sys.modules)
{code}
heavy = {{"torch", "transformers", "numpy", "peft"}} & (set(sys.modules) - before)
assert not heavy, heavy
"""


def python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LIGHT.format(code=code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_prints_the_tree_the_map_and_the_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_command([], {**BASE, "log.project": "mine"}) == 0
    printed = capsys.readouterr().out
    tree, _, rest = printed.partition("World map")
    content = tomllib.loads(tree)
    assert content["algorithm"]["steps"] == 4
    assert content["algorithm"]["reduction"] == "sequence_mean"
    assert "steps = 4                                 # command line" in tree
    assert "warning: log.project has no effect" in rest
    assert rest.endswith("The recipe is valid.\n")


@pytest.mark.parametrize(
    ("changes", "gpus", "lines"),
    [
        ({}, 0, ["learner     main        cpu         tiny-random:llama (random weights, for tests), fp32, grpo"]),
        ({}, 1, ["learner     main        cuda        tiny"]),
        ({"run.device": "cpu"}, 1, ["learner     main        cpu         tiny"]),
        (
            {"algorithm.name": "ppo"},
            0,
            ["critic      main", "reference   main        cpu         frozen, KL in the reward with beta 0.01"],
        ),
        (
            {"run.launcher": "processes", "run.collectors": 2, "buffer.max_staleness": 1},
            0,
            [
                "World map: 4 processes, no server",
                "learner     learner     cpu",
                "collector   collector-1 cpu         inprocess, with a copy of the weights; task:addition",
                "buffer      buffer      disk        ledger.sqlite in the run directory",
            ],
        ),
        ({}, 0, ["4 steps; each: 8 prompts x 8 samples = 64 samples, 1 update"]),
        (
            {"algorithm.steps": None, "data.epochs": 2, "learner.epochs": 2, "learner.minibatches": 4, "eval.every": 5},
            0,
            [
                "2 epochs of the data; each: 8 prompts x 8 samples = 64 samples, 8 updates",
                "evaluation: 20 held-out rows x 8 samples before the first step, every 5 steps and at the end",
            ],
        ),
        ({}, 0, ["collector   main        cpu         task:addition (80 rows with prompt, answer)"]),
    ],
)
def test_world_map(changes: dict[str, object], gpus: int, lines: list[str]) -> None:
    shown = "\n".join(world_map(inspect([], {**BASE, **changes}, {}), gpus))
    for line in lines:
        assert line in shown


def test_no_evaluation_no_line() -> None:
    assert "evaluation" not in "\n".join(world_map(inspect([], {**BASE, "eval.rows": 0}, {}), 0))


@pytest.mark.parametrize(
    "code",
    [
        "import miles.config.load, miles.config.headers, miles.config.schema",
        "import miles.types, miles.protocols, miles.loop, miles.errors",
        "import miles.algo, miles.buffer, miles.rollout.collect",
        "from miles.__main__ import main; assert main(['check', 'recipes/quickstart.toml']) == 0",
    ],
    ids=["config", "nouns", "collector", "check"],
)
def test_light_modules_load_nothing_heavy(code: str) -> None:
    python(f"import os; os.chdir({str(Path(__file__).parents[2])!r})\n{code}")


def test_check_takes_less_than_half_a_second_of_processor_time() -> None:
    command = [sys.executable, "-m", "miles", "check", "recipes/quickstart.toml"]
    took = []
    for _ in range(3):
        before = os.times()
        started = time.perf_counter()
        subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, check=True)
        after = os.times()
        took.append(after.children_user + after.children_system - before.children_user - before.children_system)
        if time.perf_counter() - started < 0.5:
            return
    assert min(took) < 0.5
