"""Length terms by hand."""

from __future__ import annotations

import pytest

from miles.algo.shaping import overlong_penalty, shape_rewards
from miles.config.schema import Reward
from miles.errors import ConfigError
from miles.types import Sample, Segment


def sample(reward, tokens=1, stop_reason="stop", untrained=0) -> Sample:
    mask = (False,) * untrained + (True,) * tokens
    size = len(mask)
    return Sample((Segment((0,) * size, mask, (0.0,) * size, (0,) * size),), stop_reason, "", reward)


@pytest.mark.parametrize(("length", "penalty"), [(15, 0), (16, 0), (17, -0.25), (18, -0.5), (20, -1), (25, -1)])
def test_overlong_penalty_grows_over_its_buffer(length, penalty):
    assert overlong_penalty(length, 20, 4, 1.0) == penalty
    assert overlong_penalty(length, 20, 4, 2.0) == 2 * penalty


def test_overlong_buffer_is_a_quarter_and_never_zero():
    assert overlong_penalty(15, 20) == 0
    assert overlong_penalty(20, 20) == -1
    assert overlong_penalty(2, 2) == -1
    with pytest.raises(ConfigError, match=r"overlong_buffer must be above 0, got 0"):
        overlong_penalty(3, 20, 0)


def test_penalty_counts_sampled_tokens_only():
    settings = Reward(overlong=True, overlong_buffer=4)
    assert shape_rewards([sample(1.0, tokens=9, untrained=50)], settings, 20) == [1.0]
    assert shape_rewards([sample(1.0, tokens=18)], settings, 20) == [0.5]


def test_truncated_samples_keep_lose_or_exchange_their_reward():
    cut, whole = sample(1.0, stop_reason="length"), sample(0.25)
    unscored = sample(None, stop_reason="length")
    samples = [cut, whole, unscored]
    assert shape_rewards(samples, Reward(), 20) == [1.0, 0.25, None]
    assert shape_rewards(samples, Reward(truncated="mask"), 20) == [None, 0.25, None]
    assert shape_rewards(samples, Reward(truncated="value", truncated_value=-1.0), 20) == [-1.0, 0.25, None]


def test_a_penalty_that_is_off_needs_no_arguments():
    assert shape_rewards([sample(1.0, tokens=30)], Reward(), 20) == [1.0]
