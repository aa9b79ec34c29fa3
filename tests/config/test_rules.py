"""Rules between keys: each contradiction is one sentence with key, value and way out; what has no effect is a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles.config.load import load
from miles.config.rules import rule_problems, rule_warnings
from miles.config.schema import Recipe

BASE = {"model.name": "tiny-random:llama", "data.source": "task:addition", "algorithm.steps": 4}


def recipe(**changes: Any) -> Recipe:
    overrides = {**BASE, **{key.replace("__", "."): value for key, value in changes.items()}}
    loaded = load([], overrides, env={})
    assert not loaded.refused
    return loaded.recipe


def test_a_shelf_is_for_services_without_a_common_disk() -> None:
    joined = {"engine__kind": "vllm", "engine__url": "http://10.0.0.7:7080"}
    assert rule_problems(recipe(**joined, publish__serve="10.0.0.5:7090")) == []
    (problem,) = rule_problems(recipe(**joined, publish__serve="7090"))
    assert problem.startswith("publish.serve = '7090': write HOST:PORT")
    (problem,) = rule_problems(recipe(engine__kind="vllm", publish__serve="10.0.0.5:7090"))
    assert "is for services on other machines, and engine.url names none" in problem
    (problem,) = rule_problems(recipe(**joined, publish__serve="10.0.0.5:7090", publish__directory="/shared"))
    assert "are two ways to bring weights to services" in problem


@pytest.mark.parametrize("kind", ["nccl", "ipc"])
def test_weights_from_gpu_to_gpu_are_for_own_servers_full_weights_and_one_rank(kind: str) -> None:
    served = {"engine__kind": "vllm", "publish__kind": kind}
    assert rule_problems(recipe(**served)) == []
    for changes, words in (
        ({"lora__rank": 8}, "sends all weights, and lora.rank = 8 trains an adapter"),
        ({"engine__url": "http://10.0.0.7:7080"}, "is for servers that the run starts"),
        ({"parallel__shard": 2}, "sends from one rank, and the recipe has 2"),
        ({"engine__kind": "inprocess"}, "brings weights to servers"),
    ):
        assert any(words in problem for problem in rule_problems(recipe(**{**served, **changes}))), words


def test_a_plain_recipe_has_no_problem_and_no_warning() -> None:
    assert rule_problems(recipe()) == []
    assert rule_warnings(recipe(), list(BASE)) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"run__launcher": "processes", "buffer__url": "http://127.0.0.1:1", "buffer__run": "a"},
            "buffer.url = 'http://127.0.0.1:1' names a service, and run.launcher = \"processes\" starts one of its own: leave "
            "buffer.url out, or start each role by hand (miles learn, miles collect).",
        ),
        (
            {"run__parts": "own.py:Parts", "eval__rows": 0},
            "run.parts = own.py:Parts needs collectors and learner to be processes of their own: set run.launcher to "
            '"processes", or start each role by hand (buffer.url, miles learn, miles collect).',
        ),
        (
            {"run__parts": "own.py:Parts", "run__launcher": "processes"},
            "run.parts = own.py:Parts has a learner of one's own, which Miles neither evaluates nor spreads over ranks: set "
            "eval.rows to 0, and leave parallel.shard and parallel.replicate at 1.",
        ),
        (
            {"run__launcher": "processes", "engine__kind": "vllm"},
            'engine.kind = "vllm" cannot be collected with by run.launcher = "processes" yet: leave run.launcher at "local", '
            'whose collector asks the servers while the learner waits, or set engine.kind = "inprocess".',
        ),
        ({"model__name": ""}, "model.name is not set: give a hub id, a folder, or tiny-random:llama."),
        (
            {"data__source": ""},
            "data.source is not set: give a .jsonl, .parquet or .csv file, a hub id, or task:NAME.",
        ),
        (
            {"algorithm__steps": None},
            "Neither algorithm.steps nor data.epochs is set: set one of them, it says when training ends.",
        ),
        (
            {"lora__base_bits": 4, "lora__rank": 4, "engine__kind": "vllm"},
            'lora.base_bits = 4 with engine.kind = "vllm": servers hold the base as it is, so they would sample from another '
            'policy than the one that is trained: use engine.kind = "inprocess", or leave lora.base_bits out.',
        ),
        (
            {"lora__base_bits": 8},
            "lora.base_bits = 8 stores the frozen base of adapters, and lora.rank is not set: set it, or leave lora.base_bits "
            "out.",
        ),
        (
            {"data__epochs": 2},
            "algorithm.steps = 4 and data.epochs = 2 both say when training ends: leave one of them out "
            '(or set it to "none").',
        ),
        (
            {"algorithm__groups_per_step": 6, "learner__minibatches": 5},
            "learner.minibatches = 5 does not divide algorithm.groups_per_step = 6: set learner.minibatches to 3 or 6, "
            "or algorithm.groups_per_step to 5 or 10.",
        ),
        (
            {"algorithm__groups_per_step": 2, "learner__minibatches": 3},
            "learner.minibatches = 3 does not divide algorithm.groups_per_step = 2: set learner.minibatches to 2, "
            "or algorithm.groups_per_step to 3.",
        ),
        (
            {"reward__functions": ["exact_number"], "reward__weights": [1.0, 2.0]},
            "reward.weights has 2 numbers and reward.functions 1 functions: give one weight for each function, or leave "
            "reward.weights out.",
        ),
        (
            {"reward__weights": [1.0]},
            "reward.weights has 1 numbers and reward.functions 0 functions: give one weight for each function, or leave "
            "reward.weights out.",
        ),
        (
            {"reward__functions": ["exact_number"], "reward__weights": [0]},
            "reward.weights are all 0, so that every reward is 0: give one of them another value.",
        ),
        (
            {"reward__overlong": True, "rollout__max_new_tokens": 3},
            "reward.overlong needs a buffer of tokens, and a quarter of rollout.max_new_tokens = 3 is less than one: "
            "set reward.overlong_buffer, or raise rollout.max_new_tokens.",
        ),
        (
            {"rollout__stop": ["a", ""]},
            "rollout.stop holds an empty text, which would end every completion at once: remove it.",
        ),
        (
            {"eval__rows": 0, "eval__source": "task:addition"},
            "eval.rows = 0 turns evaluation off, and eval.source = task:addition names rows for it: leave one of them out.",
        ),
        (
            {"eval__rows": 0, "run__keep_best": True},
            "run.keep_best needs evaluations, and eval.rows = 0 turns them off: set eval.rows above 0.",
        ),
        (
            {"run__stop_at_reward": 0.9},
            "run.stop_at_reward = 0.9 needs evaluations during training: set eval.every, and eval.rows above 0.",
        ),
        (
            {"data__max_rows": 5},
            "data.max_rows = 5 is fewer than algorithm.groups_per_step = 8, and a prompt stands at most once in a step: "
            "lower algorithm.groups_per_step to at most 5, or raise data.max_rows.",
        ),
        (
            {"lora__rank": 4, "lora__targets": []},
            'lora.targets is empty, so that nothing would be trained: name layers, or leave it out for ["all-linear"].',
        ),
    ],
)
def test_contradictions(changes: dict[str, Any], sentence: str) -> None:
    assert rule_problems(recipe(**changes)) == [sentence]


def test_absurdly_large_numbers_are_judged_at_once() -> None:
    (problem,) = rule_problems(recipe(algorithm__groups_per_step=2**61 + 1, learner__minibatches=2**40))
    assert "does not divide" in problem


@pytest.mark.parametrize(
    ("groups", "minibatches", "fits"), [(6, 1, True), (6, 6, True), (6, 3, True), (6, 4, False), (1, 2, False)]
)
def test_minibatches_divide_groups(groups: int, minibatches: int, fits: bool) -> None:
    found = rule_problems(recipe(algorithm__groups_per_step=groups, learner__minibatches=minibatches))
    assert (found == []) is fits


@pytest.mark.parametrize(
    ("name", "revision", "fits"),
    [
        ("org/model", None, False),
        ("org/model", "main", False),
        ("org/model", "0123456789abcdef0123456789abcdef01234567", True),
        (".", None, True),
    ],
)
def test_remote_code_needs_a_commit_unless_it_lies_on_this_machine(name: str, revision: str | None, fits: bool) -> None:
    found = rule_problems(recipe(model__name=name, model__trust_remote_code=True, model__revision=revision))
    assert (found == []) is fits
    assert fits or "set model.revision to a commit of 40 hexadecimal digits" in found[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model__revision": "main"}, "model.name = tiny-random:llama is not a hub id"),
        ({"data__split": "test"}, "data.source is not a hub id"),
        ({"eval__split": "test"}, "the held-out rows do not come from the hub"),
        ({"data__prompt_column": "question"}, "a task makes its own prompts"),
        ({"reward__truncated_value": -1.0}, 'reward.truncated is "keep"'),
        ({"reward__overlong_factor": 2.0}, "reward.overlong is false"),
        ({"reward__overlong_buffer": 0}, "reward.overlong is false"),
        ({"algorithm__kl_horizon": 10}, "algorithm.kl_target is not set"),
        ({"algorithm__kl_place": "loss"}, "algorithm.beta is 0"),
        ({"algorithm__kl_estimator": "k2"}, "algorithm.beta is 0"),
        ({"learner__min_learning_rate_ratio": 0.1}, "learner.schedule is constant"),
        ({"lora__alpha": 8.0}, "lora.rank is not set"),
        ({"lora__targets": ["q_proj"]}, "lora.rank is not set"),
        ({"log__project": "mine"}, "log.wandb and log.trackio are off"),
    ],
)
def test_a_key_that_was_set_and_does_nothing_is_a_warning(changes: dict[str, Any], why: str) -> None:
    (key,) = (name.replace("__", ".") for name in changes)
    assert rule_warnings(recipe(**changes), [key]) == [f"{key} has no effect: {why}."]
    assert rule_warnings(recipe(**changes), []) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"model__name": "org/model", "model__revision": "main"},
        {"data__source": "org/data:subset", "data__split": "test", "data__prompt_column": "question"},
        {"data__source": "org/data", "eval__split": "test"},
        {"eval__source": "org/data", "eval__split": "test"},
        {"reward__truncated": "value", "reward__truncated_value": -1.0},
        {"reward__overlong": True, "reward__overlong_factor": 2.0, "reward__overlong_buffer": 8},
        {
            "algorithm__beta": 0.1,
            "algorithm__kl_target": 0.1,
            "algorithm__kl_horizon": 10,
            "algorithm__kl_place": "loss",
        },
        {"learner__schedule": "cosine", "learner__min_learning_rate_ratio": 0.1},
        {"lora__rank": 8, "lora__alpha": 8.0, "lora__targets": ["q_proj"], "learner__learning_rate": 2e-4},
        {"log__wandb": "offline", "log__project": "mine"},
        {"run__keep_best": True, "eval__every": 2, "run__stop_at_reward": 0.9},
    ],
)
def test_a_key_that_does_something_is_no_warning(changes: dict[str, Any]) -> None:
    assert rule_warnings(recipe(**changes), [name.replace("__", ".") for name in changes]) == []
    assert rule_problems(recipe(**changes)) == []


def test_no_evaluation_leaves_its_keys_without_effect() -> None:
    keys = ["eval.every", "eval.samples", "eval.greedy"]
    assert [w.partition(" ")[0] for w in rule_warnings(recipe(eval__rows=0), keys)] == keys


def test_a_policy_that_does_not_move_is_a_warning() -> None:
    (warning,) = rule_warnings(recipe(learner__learning_rate=0), [])
    assert warning.startswith("learner.learning_rate = 0: the policy does not move")


@pytest.mark.parametrize(("warmup", "warned"), [(16, False), (17, True)])
def test_a_warm_up_longer_than_the_run_is_a_warning(warmup: int, warned: bool) -> None:
    found = rule_warnings(recipe(learner__warmup_updates=warmup, learner__epochs=2, learner__minibatches=2), [])
    assert (found != []) is warned
    assert not warned or "more than the 16 updates of the run" in found[0]


def test_staleness_in_one_process_is_a_warning() -> None:
    (warning,) = rule_warnings(recipe(buffer__max_staleness=2), [])
    assert warning.startswith(
        'buffer.max_staleness = 2 with engine.kind = "inprocess": groups get up to 2 versions old'
    )


def test_keeping_the_best_of_two_evaluations_is_a_warning() -> None:
    (warning,) = rule_warnings(recipe(run__keep_best=True), [])
    assert "compares only the model before the first step with the last one" in warning


def test_objects_from_python_stand_for_keys(tmp_path: Path) -> None:
    assert rule_problems(recipe(data__source=""), ["data.source"]) == []
    weights = recipe(reward__weights=(1.0, 2.0))
    assert rule_problems(weights, ["reward.functions"]) == []
    assert len(rule_problems(weights)) == 1
    assert rule_warnings(recipe(data__source="", data__split="x"), ["data.split"], ["data.source"]) == [
        "data.split has no effect: data.source is not a hub id."
    ]


@pytest.mark.parametrize(("rate", "warned"), [(1e-5, True), (3e-5, False), (2e-4, False)])
def test_adapters_at_a_rate_for_full_weights_are_a_warning(rate: float, warned: bool) -> None:
    found = rule_warnings(recipe(lora__rank=16, learner__learning_rate=rate), [])
    assert (found != []) is warned
    assert not warned or "2e-4 is a usual rate" in found[0]


def test_a_rank_of_zero_is_refused() -> None:
    loaded = load([], {**BASE, "lora.rank": 0}, env={})
    (problem,) = loaded.problems
    assert "lora.rank" in problem
    assert "an integer >= 1" in problem
