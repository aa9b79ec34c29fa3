from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from miles.config import schema
from miles.env.data import Dataset
from miles.env.reward import Rewards, build_rewards
from miles.env.tasks import find
from miles.env.verifiers import exact_number
from miles.errors import ConfigError, DataError, RewardError
from miles.types import Sample

ROW = {"prompt": "1 + 1 =", "answer": 2, "ground_truth": "2"}


def samples(*texts: str, parts: dict | None = None) -> list[Sample]:
    return [Sample((), "stop", text, reward_parts=parts or {}) for text in texts]


def rewards(functions: object, *, weights: tuple[float, ...] = (), **options) -> Rewards:
    limits = {key: options.pop(key) for key in ("timeout_s", "workers") if key in options}
    return build_rewards(schema.Reward(weights=weights, **limits), functions=functions, **options)


def values(functions: object, *texts: str, row: dict = ROW, **options) -> list[float | None]:
    scored = asyncio.run(rewards(functions, **options).score(7, row, samples(*texts)))
    return [sample.reward for sample in scored]


# --- signatures ------------------------------------------------------------------------------------------------------


def plain(prompts, completions, **columns):
    return [float(c == str(a)) for c, a in zip(completions, columns["answer"], strict=True)]


async def later(prompts, completions, answer):
    await asyncio.sleep(0)
    return [float(c == str(a)) for c, a in zip(completions, answer, strict=True)]


def by_name(completions, answer, **rest):
    assert rest["prompts"] == ["1 + 1 ="] * len(completions)
    return [float(c == str(a)) for c, a in zip(completions, answer, strict=True)]


def solution(data_source, solution_str, ground_truth, extra_info=None):
    assert (data_source, extra_info) == ("the data", None)
    return float(solution_str == ground_truth)


def with_k(prompts, completions, k, answer):
    return [float(c == str(a)) * k for c, a in zip(completions, answer, strict=True)]


class Callable_:
    def __call__(self, prompts, completions, answer, **columns):
        return tuple(float(c == str(a)) for c, a in zip(completions, answer, strict=True))


class AsyncCallable:
    async def __call__(self, prompts, completions, answer, **columns):
        return np.array([c == str(a) for c, a in zip(completions, answer, strict=True)], dtype=np.float32)


@pytest.mark.parametrize(
    "function",
    [
        plain,
        later,
        by_name,
        solution,
        functools.partial(with_k, k=1),
        Callable_(),
        AsyncCallable(),
        lambda p, c, answer: [x == str(a) for x, a in zip(c, answer, strict=True)],
        lambda ps, cs, **_: [{"score": float(x == "2"), "length": len(x), "note": "text"} for x in cs],
        lambda p, c, **k: later(p, c, k["answer"]),
        exact_number,
        "exact_number",
    ],
)
def test_every_kind_of_function_runs(function):
    assert values(function, "2", "3") == [1.0, 0.0]


def test_the_solution_signature_finds_its_columns_and_gets_named_ones():
    seen = []

    def f(data_source, solution_str, ground_truth, extra_info, level):
        seen.append((data_source, ground_truth, extra_info, level))
        return {"score": 1, "acc": True}

    row = {
        "prompt": "p",
        "data_source": "gsm",
        "reward_model": {"ground_truth": "9"},
        "extra_info": {"a": 1},
        "level": 3,
    }
    scored = asyncio.run(rewards(f).score(0, row, samples("x")))
    assert seen == [("gsm", "9", {"a": 1}, 3)]
    assert scored[0].reward_parts == {"f": 1.0, "f/acc": 1.0}


def test_a_function_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def half(prompts, completions, **columns):\n    return [0.5 for _ in completions]\n"
    )
    assert values(f"{tmp_path}/mine.py:half", "a") == [0.5]
    section = schema.Reward(functions=(f"{tmp_path}/mine.py:half", "exact_number"), weights=(2.0, 1.0))
    scored = asyncio.run(build_rewards(section).score(0, ROW, samples("2")))
    assert scored[0].reward == 2.0
    assert scored[0].reward_parts == {"half": 0.5, "exact_number": 1.0}


@pytest.mark.parametrize("name", ["close_number", "short", "solution"])
def test_the_example_rewards_run(name):
    file = Path(__file__).parents[2] / "examples" / "own_reward.py"
    good, bad = values(f"{file}:{name}", "2", "a much longer answer that says 9 and is wrong")
    assert good > bad


# --- weights and parts -----------------------------------------------------------------------------------------------


def one(prompts, completions, **columns):
    return [1.0] * len(completions)


def none_for_b(prompts, completions, **columns):
    return [None if c == "b" else 1 for c in completions]


def test_the_reward_is_the_weighted_sum_of_raw_parts():
    built = rewards([one, one], weights=(0.1, 0.9))
    scored = asyncio.run(built.score(0, ROW, samples("a")))
    assert scored[0].reward == pytest.approx(1.0)  # not 2.0
    assert scored[0].reward_parts == {"one": 1.0, "one_2": 1.0}
    assert built.full == pytest.approx(1.0)


def test_any_part_that_is_none_makes_the_sample_none():
    scored = asyncio.run(rewards([one, none_for_b]).score(0, ROW, samples("a", "b")))
    assert [s.reward for s in scored] == [2.0, None]
    assert scored[1].reward_parts == {"one": 1.0, "none_for_b": None}


def test_the_environments_part_counts_with_weight_one():
    built = rewards([one], weights=(0.5,), environment_scores=True)
    scored = asyncio.run(built.score(0, ROW, samples("a", parts={"environment": 0.25, "moves": 3.0})))
    assert scored[0].reward == 0.75
    assert scored[0].reward_parts == {"environment": 0.25, "moves": 3.0, "one": 1.0}
    assert built.full == 1.5
    alone = build_rewards(schema.Reward(), environment_scores=True)
    assert asyncio.run(alone.score(0, ROW, samples("a", parts={"environment": None})))[0].reward is None


def test_rewards_stay_with_their_samples():
    def slow_for_short(data_source, solution_str, ground_truth, extra_info=None):
        time.sleep(0.02 / len(solution_str))
        return float(len(solution_str))

    texts = ["a" * n for n in (8, 1, 5, 2, 7, 3, 6, 4)]
    assert values(slow_for_short, *texts) == [8, 1, 5, 2, 7, 3, 6, 4]


# --- broken contracts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], r"f returned 1 rewards for 2 completions; on row 7 of the data it returned \[1.0\]"),
        ([1.0, 1.0, 1.0], r"returned 3 rewards for 2"),
        ("11", r"must return a list .*returned '11'"),
        (1.0, r"must return a list .*returned 1.0"),
        (None, r"must return a list .*returned None"),
        ([1.0, "good"], r"must return numbers or None; on row 7 of the data it returned 'good'"),
        ([1.0, float("nan")], r"not finite.*None says `cannot be scored`.*returned nan"),
        ([1.0, float("inf")], r"not finite"),
        ([1.0, 1e308], r"above 1e\+30 in size"),
        ([1.0, -(10**400)], r"above 1e\+30 in size"),
        ([1.0, {"acc": 1}], r"a dict without the key 'score'"),
        ([1.0, [1.0]], r"must return numbers or None"),
        (np.ones((2, 2)), r"must return numbers or None"),
        ([np.ones(2), 1.0], r"must return numbers or None"),
    ],
)
def test_what_is_no_number_per_completion_names_function_row_and_value(result, message):
    def f(prompts, completions, **columns):
        return result

    with pytest.raises(RewardError, match=message):
        values(f, "a", "b")


def test_bools_and_numbers_of_array_libraries_are_numbers():
    assert values(lambda p, c, **k: [True, np.float32(0.5), np.bool_(False)], "a", "b", "c") == [1.0, 0.5, 0.0]


def test_an_exception_is_chained_and_named():
    def broken(prompts, completions, **columns):
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"reward function broken raised KeyError: 'gold', on row 7") as raised:
        values(broken, "a")
    assert isinstance(raised.value.__cause__, KeyError)


def test_a_stuck_function_times_out_and_the_next_is_still_scored():
    stuck = threading.Event()

    def wait_for_it(data_source, solution_str, ground_truth, extra_info=None):
        return 1.0 if solution_str == "fast" else stuck.wait()

    async def run() -> float | None:
        built = rewards(wait_for_it, timeout_s=0.1, workers=8)
        with pytest.raises(RewardError, match=r"wait_for_it took longer than 0.1 s on row 0 .*reward.timeout_s"):
            await built.score(0, ROW, samples(*["slow"] * 8))
        return (await built.score(1, ROW, samples("fast")))[0].reward

    try:
        assert asyncio.run(run()) == 1.0
    finally:
        stuck.set()


def test_a_weight_that_makes_a_reward_too_large_for_its_type_is_an_error():
    section = schema.Reward(weights=(1e300,))
    built = build_rewards(section, functions=lambda p, c, **k: [1e10] * len(c))
    with pytest.raises(RewardError, match=r"row 2 .*above 1e\+30 in size.*lower reward.weights"):
        asyncio.run(built.score(2, ROW, samples("a")))


def test_what_cannot_be_called_is_no_reward():
    with pytest.raises(ConfigError, match=r"reward.functions: 3 cannot be called; give a function"):
        build_rewards(schema.Reward(), functions=3)


def test_nothing_that_scores_is_an_error():
    built = build_rewards(schema.Reward(), environment_scores=True)
    with pytest.raises(RewardError, match=r"nothing scores row 3 .*set reward.functions"):
        asyncio.run(built.score(3, ROW, samples("a")))


# --- building --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: build_rewards(schema.Reward()), "reward.functions is empty"),
        (
            lambda: build_rewards(schema.Reward(functions=("exact_numbr",))),
            "no reward 'exact_numbr'; the nearest is 'exact_number'",
        ),
        (
            lambda: build_rewards(schema.Reward(functions=("no/such.py:f",))),
            "reward.functions: there is no file no/such.py",
        ),
        (lambda: rewards([one], weights=(1.0, 2.0)), "reward.weights has 2 numbers for 1 reward functions"),
        (lambda: rewards([3]), "3 cannot be called"),
        (lambda: rewards(lambda x: [1.0]), "has neither signature"),
    ],
)
def test_bad_rewards_are_refused_at_the_start(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_the_tasks_reward_is_the_default_and_the_recipes_wins():
    task = find("task:addition")
    assert build_rewards(schema.Reward(), task=task).functions[0].name == "exact_number"
    assert build_rewards(schema.Reward(functions=("exact_match",)), task=task).functions[0].name == "exact_match"


def test_a_missing_column_is_found_before_training():
    data = Dataset(({"prompt": "a", "answer": 1}, {"prompt": "b", "anwser": 2}), "rows")
    with pytest.raises(DataError, match=r"exact_number needs the column 'answer', which row 1 of rows .*'anwser'"):
        rewards("exact_number").check_columns(data)
    rewards(one).check_columns(data)
    with pytest.raises(DataError, match=r"solution needs the column 'ground_truth', which row 0"):
        rewards(solution).check_columns(data)
    rewards(functools.partial(with_k, k=1)).check_columns(data.only([0]))


def test_a_builtin_without_a_signature_is_called_with_prompts_and_completions():
    class NoSignature:
        __signature__ = "none"

        def __call__(self, prompts, completions, **columns):
            return [1.0] * len(completions)

    function: Callable = NoSignature()
    assert values(function, "a") == [1.0]


class Unspeakable(Exception):
    def __repr__(self):
        raise ValueError("no")

    __str__ = __repr__


def unspeakable(prompts, completions, **columns):
    raise Unspeakable


def long_and_red(prompts, completions, **columns):
    raise ValueError("\x1b[31m" + "x" * 100_000)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (unspeakable, r"raised Unspeakable: \(its text cannot be made\), on row 7"),
        (lambda prompts, completions: Unspeakable(), "it returned <Unspeakable whose repr fails>"),
        (long_and_red, r"raised ValueError: \ufffd\[31mx{495} \.\.\., on row 7"),
    ],
)
def test_an_error_is_told_in_one_line_whatever_its_own_text_does(function, message):
    with pytest.raises(RewardError, match=message):
        values(function, "a")


def test_a_reward_may_change_what_it_is_given():
    def changes(prompts, completions, notes, **columns):
        prompts[0].append(1)
        notes[0]["seen"] = True
        completions.clear()
        return [1.0]

    row = {"prompt": [{"role": "user", "content": "x"}], "notes": {}}
    assert values(changes, "a", row=row) == [1.0]
    assert row == {"prompt": [{"role": "user", "content": "x"}], "notes": {}}


def test_the_prompts_column_is_no_column_of_a_reward():
    data = Dataset(({"answer": "2"},), "rows", "answer")
    with pytest.raises(DataError, match=r"needs the column 'answer', which is the prompt here \(data.prompt_column\)"):
        rewards("exact_match", prompt_column="answer").check_columns(data)
