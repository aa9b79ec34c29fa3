"""Credit against hand-worked numbers, a slow reference and laws."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algo import GROUP_CREDITS, ROWS, credit
from miles.errors import RewardError


def credits(name, rewards, groups=None, lengths=None, baselines=None, **keywords):
    count = len(rewards)
    result = getattr(credit, name)(
        torch.tensor(rewards, dtype=torch.float32),
        torch.tensor(groups or [0] * count),
        torch.tensor(lengths or [1] * count),
        torch.tensor(baselines or [float("nan")] * count),
        **keywords,
    )
    assert result.dtype == torch.float32
    assert result.shape == (count,)
    return result.tolist()


@pytest.mark.parametrize(
    ("name", "rewards", "expected"),
    [
        ("group_standardized", [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ("group_centred", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("leave_one_out", [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ("group_maxrl", [1, 0, 0, 0], [3, -1, -1, -1]),
        ("group_maxrl", [0, 0, 0, 0], [0, 0, 0, 0]),
        ("step_centred", [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ("reward", [1, 0, 0.5, 0], [1, 0, 0.5, 0]),
    ],
)
def test_one_group_by_hand(name, rewards, expected):
    assert credits(name, rewards) == pytest.approx(expected, abs=1e-5)


def test_a_group_of_close_rewards_keeps_its_scale():
    assert credits("group_standardized", [1.00000, 1.00001]) == pytest.approx([-0.6195, 0.6195], abs=2e-4)


def test_scaling_is_by_group_and_can_be_left_out():
    rewards, groups = [1, 0, 1, 1], [0, 0, 1, 1]
    scaled = credits("group_standardized", rewards, groups)
    assert scaled == pytest.approx([0.70711, -0.70711, 0, 0], abs=1e-5)
    assert credits("group_standardized", rewards, groups, scale_std=False) == [0.5, -0.5, 0, 0]
    assert credits("group_centred", rewards, groups) == [0.5, -0.5, 0, 0]


def test_a_lone_sample_has_no_baseline():
    for name in ("group_standardized", "group_centred", "leave_one_out", "group_maxrl", "group_optimal_baseline"):
        assert credits(name, [0.7]) == [0.0]


def test_optimal_baseline_weighs_by_length():
    # (3 * 1 + 1 * 0) / 4 = 0.75
    assert credits("group_optimal_baseline", [1, 0], lengths=[3, 1]) == pytest.approx([0.25, -0.75])


def test_a_long_trajectory_counts_once_in_the_group_mean():
    assert credits("group_centred", [1, 0], lengths=[30, 1]) == [0.5, -0.5]


def test_step_centred_looks_over_all_groups():
    assert credits("step_centred", [1, 1, 0, 0], [0, 0, 1, 1]) == [0.5, 0.5, -0.5, -0.5]


def test_greedy_baseline_is_subtracted():
    assert credits("greedy_centred", [1, 0], baselines=[0.25, 0.25]) == [0.75, -0.25]


def test_a_missing_greedy_baseline_names_its_group():
    with pytest.raises(RewardError, match="group 7 has no reward of the prompt's greedy completion"):
        credits("greedy_centred", [1, 0], groups=[3, 7], baselines=[0.25, float("nan")])


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(RewardError, match=r"needs rewards >= 0, got -0\.5.*grpo"):
        credits("group_maxrl", [1, -0.5])


finite = st.floats(0, 10, width=32).map(lambda x: round(x, 3))
group_of_rewards = st.lists(finite, min_size=2, max_size=6)


def slow(name, rewards, lengths):
    mean = statistics.fmean(rewards)
    n = len(rewards)
    if max(rewards) == min(rewards):
        return [0.0] * n
    if name == "group_standardized":
        return [(r - mean) / (statistics.stdev(rewards) + 1e-6) for r in rewards]
    if name == "group_centred":
        return [r - mean for r in rewards]
    if name == "leave_one_out":
        return [r - (sum(rewards) - r) / (n - 1) for r in rewards]
    if name == "group_maxrl":
        return [(r - mean) / mean for r in rewards]
    baseline = sum(c * r for c, r in zip(lengths, rewards, strict=True)) / sum(lengths)
    return [r - baseline for r in rewards]


@settings(max_examples=40, deadline=None)
@given(st.lists(group_of_rewards, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_group_credits_equal_the_slow_reference_in_any_order(groups, random):
    rows = [(g, r, random.randint(1, 9)) for g, rewards in enumerate(groups) for r in rewards]
    random.shuffle(rows)
    ids, rewards, lengths = map(list, zip(*rows, strict=True))
    single = torch.tensor(rewards, dtype=torch.float32).tolist()
    for name in GROUP_CREDITS:
        got = credits(name, rewards, ids, lengths)
        for group in set(ids):
            members = [i for i, g in enumerate(ids) if g == group]
            expected = slow(name, [single[i] for i in members], [lengths[i] for i in members])
            assert [got[i] for i in members] == pytest.approx(expected, rel=1e-4, abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(group_of_rewards, st.floats(0, 100, width=32))
def test_group_means_sum_to_zero_and_ignore_a_shift(rewards, shift):
    for name in ("group_centred", "leave_one_out", "group_standardized"):
        assert sum(credits(name, rewards)) == pytest.approx(0, abs=1e-3)
    moved = [r + shift for r in rewards]
    assert credits("group_centred", moved) == pytest.approx(credits("group_centred", rewards), abs=1e-4)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e6, 0.0])
@pytest.mark.parametrize("name", GROUP_CREDITS)
def test_equal_rewards_give_exactly_zero(name, value):
    assert credits(name, [value] * 7, lengths=[1, 2, 3, 4, 5, 6, 7]) == [0.0] * 7


def test_the_rows_that_compare_groups_are_the_ones_with_group_credits():
    for row in ROWS.values():
        assert row.group_centred == (row.credit in GROUP_CREDITS)
