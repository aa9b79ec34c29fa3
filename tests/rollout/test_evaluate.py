from __future__ import annotations

import asyncio
import math
import statistics

import pytest

from miles.config.schema import Buffer, Eval
from miles.errors import RewardError
from miles.rollout.evaluate import Evaluation, evaluate, evaluation_metrics, pass_at, run_evaluation
from miles.rollout.seeds import evaluation_seeds
from miles.types import Group, Sample

ROWS = [{"name": i} for i in range(5)]


def group(*rewards: float | None, parts: dict | None = None) -> Group:
    return Group(0, 0, tuple(Sample((), "stop", "", reward=r, reward_parts=parts or {}) for r in rewards))


def test_sampled_with_fixed_seeds_at_the_training_temperature_and_greedy_beside_it(make_world):
    world = make_world(eval=Eval(samples=3))
    metrics = asyncio.run(evaluate(ROWS, world.episodes, recipe=world.recipe, full_reward=5.0))
    sampled = [(s.temperature, seeds) for s, seeds, _ in world.engine.asked if s.temperature > 0]
    assert sampled == [(1.0, tuple(evaluation_seeds(0, i, 3))) for i in range(5)]
    assert sum(s.temperature == 0 and len(seeds) == 1 for s, seeds, _ in world.engine.asked) == 5
    assert world.engine.most == 10  # all at once
    assert set(metrics) == {
        "eval/reward/mean",
        "eval/reward/greedy",
        "eval/reward/digits/mean",
        "eval/samples",
        "eval/standard_error",
        "eval/pass@1",
        "eval/pass@3",
    }
    assert metrics["eval/samples"] == 15
    assert metrics["eval/reward/greedy"] == 4.0
    assert asyncio.run(evaluate(ROWS, world.episodes, recipe=world.recipe, full_reward=5.0)) == metrics


def test_without_greedy_or_rows_their_numbers_are_absent(make_world):
    world = make_world(eval=Eval(samples=2, greedy=False))
    result = asyncio.run(run_evaluation(ROWS, world.episodes, recipe=world.recipe))
    assert (len(result.sampled), result.greedy) == (5, ())
    assert "eval/reward/greedy" not in evaluation_metrics(result)
    assert asyncio.run(evaluate([], world.episodes, recipe=world.recipe)) == {"eval/samples": 0.0}


def test_fractional_rewards_are_reported_as_rewards():
    metrics = evaluation_metrics(Evaluation((group(1.0, 0.5, 0.9),), ()))
    assert metrics["eval/reward/mean"] == pytest.approx(0.8)
    assert metrics["eval/pass@1"] == pytest.approx(1 / 3)
    assert metrics["eval/pass@3"] == 1.0
    assert "eval/standard_error" not in metrics  # one prompt says nothing about prompts


def test_unscored_samples_are_left_out_and_counted():
    metrics = evaluation_metrics(Evaluation((group(1.0, None), group(None, None), group(0.0, 0.0)), (group(None),)))
    assert metrics["eval/samples"] == 3
    assert metrics["eval/reward/mean"] == pytest.approx(1 / 3)
    assert metrics["eval/pass@2"] == 0.0  # of the one prompt with two scored samples
    assert "eval/reward/greedy" not in metrics


def test_parts_have_means_of_their_own():
    metrics = evaluation_metrics(Evaluation((group(1.0, 1.0, parts={"a": 0.5, "b": None}),), ()))
    assert metrics["eval/reward/a/mean"] == 0.5
    assert "eval/reward/b/mean" not in metrics


def test_the_standard_error_is_that_of_the_prompt_means():
    groups = (group(1.0, 0.0), group(1.0, 1.0), group(0.0, 0.0), group(1.0, 0.0))
    means = [0.5, 1.0, 0.0, 0.5]
    expected = statistics.stdev(means) / math.sqrt(4)
    assert evaluation_metrics(Evaluation(groups, ()))["eval/standard_error"] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("k", "n", "correct", "value"), [(1, 4, 1, 0.25), (4, 4, 1, 1.0), (2, 4, 1, 0.5), (2, 4, 0, 0.0)]
)
def test_pass_at_k(k, n, correct, value):
    assert pass_at(k, n, correct) == pytest.approx(value)


def test_a_row_that_fails_is_tried_again_and_then_raises(make_world):
    failures = [1, 2]

    def flaky(row, text):
        if row["name"] == 3 and failures:
            failures.pop()
            raise RewardError("the judge is away")
        return 1.0

    world = make_world(reward=flaky, buffer=Buffer(max_attempts=3), eval=Eval(greedy=False))
    assert asyncio.run(evaluate(ROWS, world.episodes, recipe=world.recipe))["eval/samples"] == 40
    failures[:] = [1, 2, 3]
    with pytest.raises(RewardError, match="the judge is away"):
        asyncio.run(evaluate(ROWS, world.episodes, recipe=world.recipe))
