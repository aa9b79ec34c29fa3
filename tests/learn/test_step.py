from __future__ import annotations

import math

import pytest
import torch

from miles.errors import DataError
from miles.learn.step import build_step, minibatches


def test_the_table_has_the_manifests_order_and_leaves_out_what_is_not_scored_or_masked(groups):
    first = groups.group(
        4,
        [
            groups.sample(groups.segment([([1, 2], False), ([3, 4], True)], [-0.5, -0.25]), reward=1.0),
            groups.sample(groups.segment([([1, 2], False), ([5], True)]), reward=None),
            groups.sample(groups.segment([([1, 2], False), ([6, 7, 8], True)]), reward=0.0, truncated=True),
        ],
        baseline=0.5,
    )
    two_segments = groups.sample(
        groups.segment([([1], False), ([9], True), ([2, 2], False), ([8, 7], True), ([2], False)], [-1, -2, -3]),
        groups.segment([([1, 1], False)]),
        groups.segment([([1, 3], False), ([4], True)], [-4]),
        reward=0.25,
    )
    settings = groups.recipe(reward__truncated="mask")
    step = build_step([first, groups.group(5, [two_segments])], 3, settings.reward, 256)
    table = step.table
    assert table.sample_ids.tolist() == [0, 0, 1, 1, 1, 1]
    assert table.behavior_logprobs.tolist() == [-0.5, -0.25, -1, -2, -3, -4]
    assert (table.starts.tolist(), table.lengths.tolist()) == ([0, 2], [2, 4])
    assert (table.group_ids.tolist(), table.rewards.tolist()) == ([0, 1], [1.0, 0.25])
    assert table.baseline_rewards[0] == 0.5
    assert math.isnan(table.baseline_rewards[1])
    assert (step.num_groups, step.version) == (2, 3)
    assert [segment.token_ids.tolist() for segment in step.segments[1]] == [[1, 9, 2, 2, 8, 7], [1, 3, 4]]
    assert [segment.slots.tolist() for segment in step.segments[1]] == [[2, 3, 4], [5]]
    assert [segment.inputs.tolist() for segment in step.segments[1]] == [[1, 9, 2, 2, 8], [1, 3]]


def test_length_terms_shape_the_reward_and_the_table_keeps_both(groups):
    settings = groups.recipe(reward__truncated="value", reward__truncated_value=-1.0)
    cut = groups.sample(groups.segment([([1], False), ([2], True)]), reward=0.75, truncated=True)
    table = build_step([groups.group(0, [cut])], 0, settings.reward, 8).table
    assert (table.rewards.tolist(), table.unshaped_rewards.tolist(), table.truncated.tolist()) == ([-1], [0.75], [True])


def test_a_step_of_nothing_is_an_empty_table(groups):
    step = groups.step([groups.group(0, [groups.sample(groups.segment([([1], False), ([2], True)]), reward=None)])])
    assert step.table.sample_ids.shape == step.table.lengths.shape == (0,)
    assert step.table.rewards.dtype == torch.float32
    assert list(step.samples) == []


def test_what_cannot_be_trained_is_refused_by_name(groups):
    with pytest.raises(DataError, match=r"ordinal 7: the first token of a segment is trained.*BOS"):
        groups.step([groups.group(7, [groups.sample(groups.segment([([2, 3], True)]))])])
    with pytest.raises(DataError, match="ordinal 8: a scored sample has no sampled token"):
        groups.step([groups.group(8, [groups.sample(groups.segment([([2, 3], False)]))])])


def test_minibatches_are_whole_groups_drawn_anew_each_epoch_and_version():
    cuts = {(v, e): minibatches(0, v, e, 8, 4) for v in range(3) for e in range(2)}
    for parts in cuts.values():
        assert [len(part) for part in parts] == [2, 2, 2, 2]
        assert sorted(group for part in parts for group in part) == list(range(8))
    assert len({str(parts) for parts in cuts.values()}) == 6
    assert minibatches(0, 1, 1, 8, 4) == cuts[1, 1]
    assert minibatches(1, 1, 1, 8, 4) != cuts[1, 1]


def test_a_short_last_manifest_is_cut_into_parts_that_differ_by_one():
    assert sorted(map(len, minibatches(0, 0, 0, 5, 4))) == [1, 1, 1, 2]
    assert sorted(map(len, minibatches(0, 0, 0, 2, 4))) == [0, 0, 1, 1]
