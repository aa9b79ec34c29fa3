"""Layers, their order, and what is said about wrong keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from miles.config import tree
from miles.config.load import load
from miles.errors import ConfigError

VALID = """
[model]
name = "tiny-random:llama"
[data]
source = "task:addition"
[algorithm]
steps = 4
"""


@dataclass(frozen=True)
class Row:
    defaults: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "grpo": Row({"reduction": "sequence_mean", "clip_high": 0.2, "correction": {"cap": 3.0}, "dual_clip": None}),
    "dapo": Row({"reduction": "token_mean", "clip_high": 0.28}),
    "own": Row({"clip_hihg": 0.3}),
}


def find(name: str) -> Row:
    if name not in ROWS:
        raise ConfigError(f"algorithm.name = {name} is not known")
    return ROWS[name]


def written(folder: Path, text: str, name: str = "recipe.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def loaded(folder: Path, text: str = "", overrides: dict[str, Any] | None = None, env: dict[str, str] | None = None):
    return load([written(folder, VALID + text)], overrides or {}, env=env or {}, rows=find)


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    first = written(
        tmp_path, VALID + "clip_high = 0.4\n[rollout]\ngroup_size = 2\nmax_turns = 2\n[eval]\nrows = 1", "a.toml"
    )
    second = written(tmp_path, "[rollout]\ngroup_size = 3\n[eval]\nrows = 2", "b.toml")
    env = {"MILES__EVAL__ROWS": "4", "MILES__ALGORITHM__CORRECTION__MODE": "bypass", "HOME": "/root"}
    result = load([first, second], {"eval.rows": 5, "run.seed": 7}, env=env, rows=find)

    assert result.problems == []
    recipe = result.recipe
    assert (recipe.eval.rows, recipe.rollout.group_size, recipe.rollout.max_turns, recipe.run.seed) == (5, 3, 2, 7)
    assert (recipe.algorithm.clip_high, recipe.algorithm.reduction) == (0.4, "sequence_mean")
    assert (recipe.algorithm.correction.cap, recipe.algorithm.correction.mode) == (3.0, "bypass")
    assert result.origins["eval.rows"] == "command line"
    assert result.origins["rollout.group_size"] == str(second)
    assert result.origins["algorithm.correction.mode"] == "environment MILES__ALGORITHM__CORRECTION__MODE"
    assert result.origins["algorithm.reduction"] == "row grpo"
    assert "learner.eps" not in result.origins


def test_row_defaults_follow_the_name_that_wins(tmp_path: Path) -> None:
    assert loaded(tmp_path, "", {"algorithm.name": "dapo"}).recipe.algorithm.clip_high == 0.28
    assert loaded(tmp_path, 'name = "dapo"').recipe.algorithm.reduction == "token_mean"
    assert (
        loaded(tmp_path, "", {"algorithm.name": "dapo", "algorithm.clip_high": 0.1}).recipe.algorithm.clip_high == 0.1
    )


def test_without_rows_the_schema_alone_counts(tmp_path: Path) -> None:
    assert load([written(tmp_path, VALID)], {}, env={}).recipe.algorithm.clip_high is None


def test_unknown_row_is_one_problem_and_says_where_it_was_named(tmp_path: Path) -> None:
    assert loaded(tmp_path, "", {"algorithm.name": "gpro"}).problems == [
        "algorithm.name = gpro is not known (command line)"
    ]


def test_a_rows_own_misspelt_default_is_a_problem(tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, 'name = "own"').problems
    assert (
        problem == "algorithm.clip_hihg = 0.3 (row own) is not a key of the recipe: the nearest is algorithm.clip_high."
    )


def test_every_mistake_is_told_at_once_and_rules_still_judge_the_rest(tmp_path: Path) -> None:
    text = """
groups_per_step = 6
step = 3
[rollout]
group_size = "eight"
temperature = 0.0
[learner]
minibatches = 4
[algoritm]
steps = 3
[algorithm.corection]
mode = "none"
"""
    result = loaded(tmp_path, text, {"eval.greedy": "yes"}, {"MILES__LEARNER__BETAS": "[0.9, 1.0]"})
    path = tmp_path / "recipe.toml"
    assert sorted(result.problems) == sorted(
        [
            f"algorithm.step = 3 ({path}) is not a key of the recipe: the nearest is algorithm.steps.",
            f'rollout.group_size = "eight" ({path}) must be an integer >= 1.',
            f"rollout.temperature = 0.0 ({path}) must be a number > 0.",
            f"[algoritm] ({path}) is not a section of the recipe: the nearest is [algorithm].",
            f"[algorithm.corection] ({path}) is not a section of the recipe: the nearest is [algorithm.correction].",
            'eval.greedy = "yes" (command line) must be true or false.',
            "learner.betas = [0.9, 1.0] (environment MILES__LEARNER__BETAS) must be a list of 2 numbers >= 0 and < 1.",
            "learner.minibatches = 4 does not divide algorithm.groups_per_step = 6: set learner.minibatches to 3 or 6, "
            f"or algorithm.groups_per_step to 4 or 8. ({path})",
        ]
    )
    assert result.refused == {"rollout.group_size", "rollout.temperature", "eval.greedy", "learner.betas"}


def test_one_value_for_a_list_is_told_how_to_write_it(tmp_path: Path) -> None:
    result = loaded(tmp_path, "", {"reward.functions": "mine.py:f", "reward.weights": 0.5, "learner.betas": 0.5})
    assert sorted(problem for problem in result.problems if problem.startswith(("reward", "learner"))) == [
        "learner.betas = 0.5 (command line) must be a list of 2 numbers >= 0 and < 1.",
        'reward.functions = "mine.py:f" (command line) must be a list of texts: put it in brackets, ["mine.py:f"].',
        "reward.weights = 0.5 (command line) must be a list of numbers: put it in brackets, [0.5].",
    ]


def test_rules_say_nothing_about_a_key_that_was_refused(tmp_path: Path) -> None:
    result = loaded(
        tmp_path, "[learner]\nminibatches = 3\n", {"algorithm.groups_per_step": 0, "algorithm.steps": "many"}
    )
    assert sorted(problem.partition(" = ")[0] for problem in result.problems) == [
        "algorithm.groups_per_step",
        "algorithm.steps",
    ]


def test_rule_names_the_layer_of_each_key(tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, "", {"data.epochs": 2}).problems
    assert problem.endswith(f"(algorithm.steps: {tmp_path / 'recipe.toml'}; data.epochs: command line)")


@pytest.mark.parametrize("key", [key for key, info in tree.fields().items() if info.annotation is bool])
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("place", ["file", "environment", "command line"])
def test_switches_are_as_asked_wherever_they_are_set(tmp_path: Path, key: str, asked: bool, place: str) -> None:
    section, _, name = key.rpartition(".")
    text = str(asked).lower()
    switch = written(tmp_path, f"[{section}]\n{name} = {text}\n" if place == "file" else "", "switch.toml")
    result = load(
        [written(tmp_path, VALID), switch],
        {key: text} if place == "command line" else {},
        env={f"MILES__{section.upper()}__{name.upper()}": text} if place == "environment" else {},
    )
    assert tree.get(result.recipe, key) is asked


@pytest.mark.parametrize(("text", "seed"), [("", 0), ("[run]\nseed = 0", 0), ("[run]\nseed = 7", 7)])
def test_seed_absent_zero_and_seven(tmp_path: Path, text: str, seed: int) -> None:
    assert loaded(tmp_path, text).recipe.run.seed == seed


@pytest.mark.parametrize(
    ("text", "value"),
    [("[learner]\nclip_norm = 'none'", None), ("[learner]\nclip_norm = 2", 2.0), ("[learner]\n", 1.0)],
)
def test_none_empties_a_key_that_has_a_default(tmp_path: Path, text: str, value: float | None) -> None:
    assert loaded(tmp_path, text).recipe.learner.clip_norm == value


def test_none_is_a_text_for_a_text_key_of_a_file_and_python_none_empties_it(tmp_path: Path) -> None:
    named = written(tmp_path, "[rollout]\nenvironment = 'none'")
    assert load([named], {}, env={}).recipe.rollout.environment == "none"
    assert load([named], {"rollout.environment": None}, env={}).recipe.rollout.environment is None


@pytest.mark.parametrize("value", ["16", "16.0", "true", "[16]", "{a = 1}", "2024-01-01", "inf"])
def test_a_file_value_of_another_type_is_never_converted(tmp_path: Path, value: str) -> None:
    text = VALID.replace("steps = 4", f'steps = "{value}"' if value == "16" else f"steps = {value}")
    result = load([written(tmp_path, text)], {}, env={})
    (problem,) = result.problems
    assert problem.startswith("algorithm.steps = ")
    assert problem.endswith('must be an integer >= 1, or "none".')


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_are_finite(tmp_path: Path, value: str) -> None:
    result = loaded(tmp_path, f"[reward]\nweights = [{value}]\ntruncated_value = {value}")
    assert result.refused == {"reward.weights", "reward.truncated_value"}


def test_long_values_are_cut_in_messages(tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, "", {"algorithm.steps": "x" * 500}).problems
    assert len(problem) < 150
    assert "..." in problem


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("no.toml", None, "does not exist"),
        ("bad.toml", b"[model\n", "is not valid TOML: Expected ']'"),
        (
            "latin.toml",
            b"[model]\nname = '\xe9'",
            "is not UTF-8 text (invalid continuation byte at byte 16): save it as UTF-8.",
        ),
        ("folder.toml", "folder", "is a folder"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_problem(tmp_path: Path, name: str, content: Any, words: str) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    result = load([written(tmp_path, VALID), path], {}, env={})
    (problem,) = result.problems
    assert problem.startswith(f"{path} {words}")


def test_a_path_below_a_file_is_a_problem(tmp_path: Path) -> None:
    below = written(tmp_path, VALID) / "recipe.toml"
    (problem,) = load([written(tmp_path, VALID), below], {}, env={}).problems
    assert problem == f"{below} cannot be read: Not a directory."


def test_keys_outside_any_section_and_sections_that_are_no_tables(tmp_path: Path) -> None:
    path = written(
        tmp_path, "foo = 3\nsteps = 4\nalgorithm = 'grpo'\n[model]\nname = 'x'\nzzz = 1\n[data]\nsource = 'y'"
    )
    problems = load([path], {}, env={}).problems
    assert problems[0].startswith(f"foo = 3 ({path}) is not a key of the recipe: the sections are model, data, ")
    assert problems[1] == f"steps = 4 ({path}) is not a key of the recipe: the nearest is algorithm.steps."
    assert problems[2] == (
        f'algorithm = "grpo" ({path}): algorithm is a section; set its keys, such as algorithm.name.'
    )
    assert problems[3] == (
        f"model.zzz = 1 ({path}) is not a key of the recipe: [model] has name, revision, trust_remote_code."
    )


def test_far_off_section_lists_the_sections(tmp_path: Path) -> None:
    (problem,) = loaded(tmp_path, "[zzzz]\na = 1").problems
    assert "is not a section of the recipe: there are model, data, reward, " in problem


def test_given_objects_stand_for_keys(tmp_path: Path) -> None:
    path = written(tmp_path, "[algorithm]\nsteps = 1")
    starts = {problem.split(" is ")[0] for problem in load([path], {}, env={}).problems}
    assert starts == {"model.name", "data.source"}
    assert load([path], {}, env={}, given=["model.name", "data.source"]).problems == []


def test_sections_may_be_given_as_mappings_and_the_layer_named(tmp_path: Path) -> None:
    overrides = {"learner": {"betas": [0.9, 0.99], "epochs": 0}}
    result = load([written(tmp_path, VALID)], overrides, env={}, overrides_from="miles.train")
    assert result.recipe.learner.betas == (0.9, 0.99)
    assert result.problems == ["learner.epochs = 0 (miles.train) must be an integer >= 1."]


def test_of_a_recipe_that_cannot_be_read_nothing_else_is_said(tmp_path):
    absent = tmp_path / "absent.toml"
    problems = load([absent], {"learner.epochs": 0, "run.sed": 1}, env={}).problems
    assert problems == [
        f"{absent} does not exist: give the path of a recipe (.toml).",
        "run.sed = 1 (command line) is not a key of the recipe: the nearest is run.seed.",
        "learner.epochs = 0 (command line) must be an integer >= 1.",
    ]


def test_a_byte_order_mark_is_no_part_of_a_recipe(tmp_path):
    path = tmp_path / "mark.toml"
    path.write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    assert load([path], {}, env={}).problems == []


@pytest.mark.parametrize("value", ["a\udcffb", ["a", "\udcff"]])
def test_half_a_character_is_a_problem_of_its_key(value, tmp_path):
    key = "data.system_prompt" if isinstance(value, str) else "rollout.stop"
    (problem,) = loaded(tmp_path, "", {key: value}).problems
    assert problem.startswith(f"{key} = ")
    assert problem.endswith("(command line) holds half a character: write it as UTF-8.")
    assert problem.isascii()
