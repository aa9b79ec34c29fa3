"""What a look at the data tells: missing files and columns, too few rows, rewards that need a column."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles.config.load import load
from miles.run.inputs import read_data


def look(source: Path | str, given: list[str] | None = None, **changes: Any) -> tuple[list[str], dict[str, str]]:
    overrides = {
        "data.source": str(source),
        "algorithm.groups_per_step": 4,
        "eval.rows": 2,
        "reward.functions": ["exact_match"],
    }
    recipe = load([], {**overrides, **{k.replace("__", "."): v for k, v in changes.items()}}, env={}).recipe
    facts: dict[str, str] = {}
    return read_data(recipe, facts, given or []), facts


def rows(folder: Path, count: int, name: str = "rows.jsonl", **columns: Any) -> Path:
    path = folder / name
    row = {"answer": "x", **columns}
    path.write_text("".join(json.dumps({"prompt": f"p{i}", **row}) + "\n" for i in range(count)), encoding="utf-8")
    return path


def test_enough_rows_are_no_problem_and_no_more_are_read(tmp_path: Path) -> None:
    path = rows(tmp_path, 7)
    with path.open("a", encoding="utf-8") as file:
        file.write("not JSON, and not reached\n")
    assert look(path) == ([], {"data.source": "at least 7 rows with prompt, answer"})


@pytest.mark.parametrize(("count", "train"), [(4, 4), (5, 4), (6, 5)])
def test_few_rows_suffice_for_one_step(tmp_path: Path, count: int, train: int) -> None:
    path = rows(tmp_path, count)
    assert look(path)[0] == []
    (problem,) = look(path, algorithm__groups_per_step=train + 1)[0]
    assert problem.startswith(f"algorithm.groups_per_step = {train + 1} is more than the {train} rows of {path}")
    assert problem.endswith(f"lower it to at most {train}, or give more rows.")


def test_most_rows_count(tmp_path: Path) -> None:
    path = rows(tmp_path, 100)
    assert look(path, data__max_rows=5)[0] == []
    (problem,) = look(path, data__max_rows=4, eval__rows=0, algorithm__groups_per_step=5)[0]
    assert "is more than the 4 rows" in problem


def test_the_tasks_rows_are_counted() -> None:
    assert look("task:addition", algorithm__groups_per_step=80, reward__functions=[])[0] == []
    (problem,) = look("task:addition", algorithm__groups_per_step=81, reward__functions=[])[0]
    assert "is more than the 80 rows of task:addition" in problem


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "does not exist"),
        ("", "has no rows"),
        ("{\n", "line 1 is not JSON"),
        ("[1]\n", "line 1 is a list"),
        ('{"question": "x"}\n', "has no column 'prompt'"),
        ('{"prompt": ""}\n', "prompt"),
    ],
)
def test_files_that_cannot_be_trained_on(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    (problem,) = look(path)[0]
    assert words in problem
    assert str(path) in problem


def test_unknown_task_names_the_nearest() -> None:
    (problem,) = look("task:adition", reward__functions=[])[0]
    assert "adition" in problem
    assert "addition" in problem


def test_a_built_in_reward_needs_its_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "p", "solution": "x"}\n' * 9, encoding="utf-8")
    (problem,) = look(path, reward__functions=["exact_match"])[0]
    assert "needs the column 'answer'" in problem


def test_rows_without_any_reward_are_a_problem(tmp_path: Path) -> None:
    (problem,) = look(rows(tmp_path, 9), reward__functions=[])[0]
    assert problem.startswith("reward.functions is empty")
    assert look(rows(tmp_path, 9), reward__functions=[], rollout__environment="e.py:E")[0] == []


def test_a_users_reward_and_objects_from_python_are_left_to_training(tmp_path: Path) -> None:
    assert look(rows(tmp_path, 9), reward__functions=["mine.py:f"])[0] == []
    assert look(rows(tmp_path, 9), given=["reward.functions"], reward__functions=[])[0] == []
    assert look("missing.jsonl", given=["data.source"])[0] == []


def test_weights_that_do_not_fit_are_left_to_the_rule(tmp_path: Path) -> None:
    assert look(rows(tmp_path, 9), reward__weights=[1.0, 2.0])[0] == []


def test_hub_ids_are_not_looked_up() -> None:
    problems, facts = look("org/data")
    assert facts == {}
    assert all("pip install 'miles-rl[data]'" in problem for problem in problems)
