"""`miles.train`: rows and functions of a Python session instead of files, also in a notebook and in threads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import miles
from miles.errors import BadInput, ConfigError, DataError, RewardError

ROWS = [{"prompt": f"{i} =", "answer": i} for i in range(10)]
TINY = {
    "algorithm.groups_per_step": 4, "rollout.group_size": 4, "rollout.max_new_tokens": 4, "eval.rows": 2, "eval.samples": 2,
    "log.live": "off", "run.threads": 1,
}  # fmt: skip


def digit(prompts: list[str], completions: list[str], answer: list[int], **columns: Any) -> list[float]:
    assert prompts == [f"{answer[0]} ="] * len(completions)
    return [float(str(a) in text) for a, text in zip(answer, completions, strict=True)]


async def length(prompts: list[str], completions: list[str], **columns: Any) -> list[float | None]:
    await asyncio.sleep(0)
    return [len(text) / 4 if text else None for text in completions]


def solution(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": float(solution_str[:1].isdigit()), "characters": len(solution_str)}


class Ones:
    def __call__(self, prompts, completions):
        return [float(text.count("1")) for text in completions]


def train(folder: Path, **given: Any) -> Any:
    settings = {
        "model": "tiny-random:llama",
        "data": ROWS,
        "reward": digit,
        "algorithm": "grpo",
        "steps": 2,
        **TINY,
        **given,
    }
    return miles.train(run_dir=folder / "run", **settings)


def steps(run: Any) -> list[dict[str, Any]]:
    return [row for row in run.metrics if "event" not in row]


def test_rows_and_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path)
    assert (run.exit_code, run.run_dir, run.model_dir) == (0, tmp_path / "run", tmp_path / "run" / "final")
    assert [row["version"] for row in run.metrics] == [0, 1, 2, 2]
    assert all(row["reward/digit/mean"] == row["reward/mean"] for row in steps(run))
    assert (run.model_dir / "model.safetensors").exists()
    assert (run.run_dir / "report.html").exists()
    assert (
        "2 held-out rows taken out of the rows given from Python, which leaves 8 to train on" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("reward", "part"),
    [(length, "length"), (Ones(), "Ones"), ("exact_match", "exact_match"), (lambda p, c: [0.5] * len(c), "reward")],
)
def test_rewards_of_every_kind(reward: Any, part: str, tmp_path: Path) -> None:
    (row,) = steps(train(tmp_path, reward=reward, steps=1))
    assert row[f"reward/{part}/mean"] == row["reward/mean"]


def test_several_rewards_with_weights(tmp_path: Path) -> None:
    (row,) = steps(train(tmp_path, reward=[length, Ones()], steps=1, **{"reward.weights": [1.0, 0.25]}))
    assert row["reward/mean"] == pytest.approx(row["reward/length/mean"] + 0.25 * row["reward/Ones/mean"])


def test_a_reward_of_single_solutions(tmp_path: Path) -> None:
    rows = [{**row, "ground_truth": "1"} for row in ROWS]
    (row,) = steps(train(tmp_path, data=iter(rows), reward=solution, steps=1))
    assert row["reward/solution/characters/mean"] > 0


def test_a_file_of_rows_an_own_algorithm_and_a_recipe_below(tmp_path: Path) -> None:
    examples = Path(__file__).parents[1] / "examples"
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[learner]\nlearning_rate = 0.002\n[algorithm]\nsteps = 9\n", encoding="utf-8")
    own = f"{examples / 'own_algorithm.py'}:SOFT_CLIP"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    run = train(
        tmp_path, data=data, algorithm=own, recipe=recipe, steps=1, reward=lambda p, c: [i % 2 for i in range(len(c))]
    )
    assert steps(run)[0]["lr"] == 0.002
    assert f'source = "{data}"' in (run.run_dir / "config.toml").read_text(encoding="utf-8")


def test_a_run_from_python_is_resumed_and_exported(tmp_path: Path) -> None:
    from miles.__main__ import main

    train(tmp_path)
    assert len(steps(train(tmp_path, steps=3, resume=True))) == 3
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 0
    with pytest.raises(BadInput, match="the training rows are not those that the run in"):
        train(tmp_path, data=ROWS[:-1], steps=4, resume=True)
    with pytest.raises(BadInput, match="resume=True needs run_dir"):
        miles.train(model="tiny-random:llama", data=ROWS, reward=digit, steps=1, resume=True)


def test_inside_a_loop_as_in_a_notebook(tmp_path: Path) -> None:
    plain = train(tmp_path / "plain", reward=[digit, length])

    async def cell() -> Any:
        return train(tmp_path / "cell", reward=[digit, length])

    run = asyncio.run(cell())
    weights = [(r.model_dir / "model.safetensors").read_bytes() for r in (plain, run)]
    assert weights[0] == weights[1]


def test_in_a_thread(tmp_path: Path) -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train(tmp_path, steps=1)))
    thread.start()
    thread.join()
    assert found[0].exit_code == 0


@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_ctrl_c_keeps_a_checkpoint_and_reaches_the_caller(inside_a_loop: bool, tmp_path: Path) -> None:
    calls: list[int] = []

    def interrupts(prompts, completions):
        calls.append(1)
        if len(calls) == 12:  # the second step, after four held-out calls of the evaluation
            os.kill(os.getpid(), signal.SIGINT)
        return [float(len(text)) for text in completions]

    async def cell() -> None:
        train(tmp_path, reward=interrupts)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(cell()) if inside_a_loop else train(tmp_path, reward=interrupts)
    assert signal.getsignal(signal.SIGINT) == before
    assert (tmp_path / "run" / "checkpoints" / "LATEST").read_text() == "step_000001\n"
    assert len(steps(train(tmp_path, reward=interrupts, resume=True))) == 2


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (
            {"data": [ROWS[0], 3]},
            DataError,
            "row 1 of the rows given from Python is a int, not a dict with a prompt: 3",
        ),
        ({"data": []}, DataError, "has no rows"),
        ({"data": ROWS[0]}, DataError, "must be an iterable of dicts with a prompt, got a dict"),
        ({"data": [{"question": "1"}] * 9}, DataError, "row 0 of the rows given from Python .* has no column 'prompt'"),
        ({"reward": 3}, ConfigError, "reward.functions: 3 cannot be called"),
        ({"reward": None}, ConfigError, "reward.functions is empty"),
        ({"reward": [digit, length], "reward.weights": [1.0]}, ConfigError, "1 numbers for 2 reward functions"),
        ({"steps": "many"}, ConfigError, r'algorithm.steps = "many" \(miles.train\) must be an integer >= 1'),
        ({"rollout.grup_size": 3}, ConfigError, r"rollout.grup_size = 3 \(miles.train\) is not a key of the recipe"),
        ({"data": None, "reward": None}, ConfigError, "data.source is not set"),
        ({"model": None}, ConfigError, "model.name is not set"),
        ({"reward": lambda p, c: [1.0]}, RewardError, "returned 1 rewards for"),
    ],
)
def test_what_cannot_be_used(given: dict[str, Any], error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        train(tmp_path, **given)


def test_importing_miles_loads_nothing_heavy() -> None:
    import subprocess
    import sys

    code = "import miles, sys; assert not {'torch', 'transformers'} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_texts_of_array_libraries_are_prompts_too(tmp_path):
    rows = [{"prompt": np.str_(f"{i} ="), "answer": i} for i in range(10)]
    assert train(tmp_path / "a", data=rows, steps=1).exit_code == 0
    assert train(tmp_path / "b", steps=1).exit_code == 0
    shown = [(tmp_path / name / "run" / "samples.jsonl").read_bytes() for name in "ab"]
    assert shown[0] == shown[1]
