"""A user's own reward, data, algorithm and environment, each from files outside of the package, by a recipe."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "my files ü"
    shutil.copytree(EXAMPLES, folder, ignore=shutil.ignore_patterns("__pycache__"))
    data = folder / "own_data.jsonl"
    lines = data.read_text(encoding="utf-8").splitlines(keepends=True)
    # Tiny models have no chat template, so rows of chat messages are left out.
    data.write_text("".join(line for line in lines if isinstance(json.loads(line)["prompt"], str)), encoding="utf-8")
    return folder


def test_own_data_and_own_rewards_of_every_kind(runs, mine, tools):
    reward = mine / "own_reward.py"
    ended = runs.train(
        data__source=str(mine / "own_data.jsonl"), eval__rows=0,
        reward__functions=[f"{reward}:close_number", f"{reward}:short"], reward__weights=[1.0, 0.5],
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert f"rows of {mine / 'own_data.jsonl'}" in ended.out
    for row in tools.rows(runs["run"]):
        close, short = row["reward/close_number/mean"], row["reward/short/mean"]
        assert row["reward/mean"] == pytest.approx(close + 0.5 * short)
        assert 0 < short <= 1


def test_chat_messages_without_a_template_name_their_row(runs, tmp_path):
    ended = runs.train(data__source=str(EXAMPLES / "own_data.jsonl"))
    assert ended.code == 2
    assert re.search(r"row \d+ of .*own_data.jsonl \(counted from 0\): a prompt is a list of messages", ended.message)


def test_a_reward_that_is_called_for_each_solution(runs, tmp_path, mine, tools):
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i} =", "ground_truth": i}) + "\n" for i in range(8)), encoding="utf-8"
    )
    ended = runs.train(
        data__source=str(data), reward__functions=[f"{mine / 'own_reward.py'}:solution"], algorithm__steps=1
    )
    assert ended.code == 0, ended.err
    (row,) = tools.rows(runs["run"])
    assert row["reward/solution/characters/mean"] > 1


def test_an_own_algorithm(runs, mine, tools):
    changes = {"algorithm__name": f"{mine / 'own_algorithm.py'}:SOFT_CLIP", "learner__epochs": 2}
    ended = runs.train(**changes)
    assert ended.code == 0, ended.err
    assert any(row.get("algorithm/gate", 0) > 0 for row in tools.rows(runs["run"]))
    config = (runs["run"] / "config.toml").read_text(encoding="utf-8")
    assert 'reduction = "sequence_mean"' in config  # the row's own default
    assert runs.train(**{**changes, "algorithm__steps": 3}, resume=True).code == 0


def test_an_own_environment(runs, mine, tools):
    ended = runs.train(
        rollout__environment=f"{mine / 'own_environment.py'}:SecondChance", rollout__max_turns=2, reward__functions=[],
    )  # fmt: skip
    assert ended.code == 0, ended.err
    row = tools.rows(runs["run"])[-1]
    assert row["reward/environment/mean"] == row["reward/mean"]


def test_files_are_found_from_where_the_run_starts(runs, mine, tools, monkeypatch):
    monkeypatch.chdir(mine)
    changes = {
        "data__source": "own_data.jsonl",
        "reward__functions": ["own_reward.py:close_number"],
        "algorithm__steps": 1,
    }
    assert runs.train(**changes).code == 0
    assert 'source = "own_data.jsonl"' in (runs["run"] / "config.toml").read_text(encoding="utf-8")
