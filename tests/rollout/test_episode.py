from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from miles.errors import EpisodeError, RewardError
from miles.rollout.episode import greedy
from miles.types import Sampling


def group_of(world, **options):
    return asyncio.run(world.episodes.group(5, 2, {"name": "x"}, [1, 2, 3], **options))


def test_a_group_holds_its_scored_samples_and_the_prompts_text(make_world):
    world = make_world()
    group = group_of(world)
    assert (group.ordinal, group.row, group.prompt_text, group.baseline_reward) == (5, 2, "prompt x", None)
    assert [sample.reward for sample in group.samples] == [float(sample.text[0]) for sample in group.samples]
    assert world.engine.asked == [(Sampling(4), (1, 2, 3), 0)]


def test_the_greedy_baseline_is_sampled_beside_and_is_no_sample(make_world):
    world = make_world()
    group = group_of(world, greedy_baseline=True)
    assert len(group.samples) == 3
    assert group.baseline_reward == 4.0
    assert [sampling.temperature for sampling, _, _ in world.engine.asked] == [1.0, 0.0]
    assert world.engine.most == 2  # both at the same time, so that the engine can batch them


def test_older_weights_are_refused_and_answers_are_told(make_world):
    world = make_world()
    answers = []
    episodes = world.episodes.at_least(3, lambda: answers.append(1))
    group = asyncio.run(episodes.group(0, 0, {"name": 0}, [1]))
    assert world.engine.asked[0][2] == 3
    assert (group.version_min, group.version_max) == (3, 3)
    assert answers == [1]


def test_a_failure_of_one_half_ends_the_other(make_world):
    def fail(row, text):
        raise RewardError("broken")

    world = make_world(reward=fail)
    with pytest.raises(RewardError, match="broken"):
        group_of(world, greedy_baseline=True)


def test_an_environment_with_a_short_group_is_an_error(make_world):
    class Short:
        async def episodes(self, row, engine, sampling, seeds):
            return []

    episodes = replace(make_world().episodes, environment=Short())
    with pytest.raises(EpisodeError, match="0 samples for 3 seeds on row 2"):
        asyncio.run(episodes.group(5, 2, {"name": "x"}, [1, 2, 3]))


def test_greedy_keeps_limits_and_stops():
    assert greedy(Sampling(7, 0.8, (1,), ("x",))) == Sampling(7, 0.0, (1,), ("x",))
