"""From files and overrides to one recipe: every layer's objections together, and every recipe of the repository valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles.config.toml import dump_toml
from miles.errors import ConfigError
from miles.run.recipes import inspect, resolve

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
BASE = {"model.name": "tiny-random:llama", "data.source": "task:addition", "algorithm.steps": 4}


def problems(overrides: dict[str, Any], **options: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        inspect([], {**BASE, **overrides}, {}, **options)
    return error.value.problems


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_of_the_repository_are_valid_and_say_nothing_idle(path: Path) -> None:
    resolved = inspect([path], {}, {})
    assert [warning for warning in resolved.warnings if "has no effect" in warning] == []
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_there_is_a_recipe_for_every_row() -> None:
    from miles import algo

    assert {resolve([path], {}, {}).algorithm.name for path in RECIPES} == set(algo.ROWS)


def test_the_quickstart_is_what_the_readme_says() -> None:
    recipe = resolve([path for path in RECIPES if path.stem == "quickstart"], {}, {})
    algorithm, learner = recipe.algorithm, recipe.learner
    assert (algorithm.name, algorithm.steps, algorithm.groups_per_step, recipe.rollout.group_size) == ("grpo", 16, 8, 8)
    assert (algorithm.scale_std, algorithm.reduction, algorithm.beta) == (False, "token_mean", 0.0)
    assert (learner.learning_rate, learner.betas, learner.weight_decay, learner.clip_norm) == (1e-5, (0.9, 0.99), 0, 1)
    assert (recipe.rollout.max_new_tokens, recipe.rollout.temperature, learner.param_dtype) == (8, 1.0, "fp32")
    assert (recipe.eval.rows, recipe.eval.samples) == (20, 8)


def test_a_resolved_recipe_feeds_back_to_an_equal_one(tmp_path: Path) -> None:
    for path in RECIPES:
        recipe = resolve([path], {"algorithm.dual_clip": None}, {})
        copy = tmp_path / path.name
        copy.write_text(dump_toml(recipe), encoding="utf-8")
        assert resolve([copy], {}, {}) == recipe


def test_the_resolved_recipe_holds_the_number_of_threads() -> None:
    assert (resolve([], BASE, {}).run.threads or 0) >= 1
    assert resolve([], {**BASE, "run.threads": 3}, {}).run.threads == 3


def test_schema_rules_files_and_algorithm_object_together(tmp_path: Path) -> None:
    found = problems(
        {
            "model.name": "no/such/folder",
            "data.source": str(tmp_path / "missing.jsonl"),
            "algorithm.steps": "many",
            "rollout.group_sise": 8,
            "rollout.group_size": 1,
            "learner.minibatches": 3,
        }
    )
    assert len(found) == 6
    for words in (
        "rollout.group_sise = 8 (command line) is not a key of the recipe: the nearest is rollout.group_size.",
        "model.name = no/such/folder does not exist",
        "missing.jsonl does not exist",
        'algorithm.steps = "many" (command line) must be an integer >= 1',
        "rollout.group_size must be >= 2 for grpo, got 1",
        "learner.minibatches = 3 does not divide algorithm.groups_per_step = 8",
    ):
        assert any(words in problem for problem in found), words


def test_a_refused_key_brings_no_objection_of_the_row() -> None:
    assert problems({"rollout.group_size": 0}) == ["rollout.group_size = 0 (command line) must be an integer >= 1."]


def test_unknown_algorithm_is_told_once_with_the_nearest_row() -> None:
    (problem,) = problems({"algorithm.name": "GRP0"})
    assert 'there is no algorithm "GRP0"; the nearest is "grpo"' in problem
    assert problem.endswith("(command line)")


OWN_ROW = """
from miles.algo import AlgorithmRow

OWN = AlgorithmRow("own", "group_centred", "broadcast", "clipped", "test",
                   defaults={"clip_low": 0.1, "clip_high": 0.3}, group_centred=True)
"""


def test_a_row_of_the_users_own_brings_its_defaults(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_ROW, encoding="utf-8")
    resolved = inspect([], {**BASE, "algorithm.name": f"{path}:OWN"}, {})
    assert (resolved.row.name, resolved.recipe.algorithm.clip_high) == ("own", 0.3)
    assert resolved.origins["algorithm.clip_high"] == f"row {path}:OWN"


def test_a_users_file_is_not_run_when_it_lacks_the_name(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')", encoding="utf-8")
    (problem,) = problems({"algorithm.name": f"{path}:OWN"})
    assert f"{path} does not define OWN; it defines nothing." in problem
    assert not (tmp_path / "was_run").exists()


def test_warnings_of_rules_and_row_come_together() -> None:
    overrides = {**BASE, "log.project": "mine", "learner.param_dtype": "bf16"}
    found = inspect([], overrides, {}).warnings
    assert any(text.startswith("log.project has no effect") for text in found)
    assert any(text.startswith("learner.param_dtype = bf16") for text in found)


def test_objects_from_python_stand_for_data_and_reward() -> None:
    overrides = {"model.name": "tiny-random:llama", "algorithm.steps": 1, "reward.functions": ["no.py:f"]}
    recipe = resolve([], overrides, {}, given=["data.source", "reward.functions"], overrides_from="miles.train")
    assert recipe.data.source == ""
