"""Values and laws of the metrics that come from finished groups."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.observe.metrics import group_metrics, is_error, reason_kind, throughput_metrics
from miles.types import FinishedGroup


def make(ordinal: int, rewards: list[float | None], lengths: list[int], reason: str | None = None) -> FinishedGroup:
    return FinishedGroup(ordinal, reason, tuple(rewards), {}, tuple(lengths), (False,) * len(lengths), 1.0, 0.0, 0)


def test_fractional_rewards_are_means_and_not_a_share_of_ones(synthetic: ModuleType) -> None:
    row = group_metrics([synthetic.finished_group(0, [1.0, 0.5, 0.9], [2, 4, 6])])
    assert row["reward/mean"] == pytest.approx(0.8)
    assert row["reward/std"] == pytest.approx(math.sqrt((0.04 + 0.09 + 0.01) / 3))
    assert row["completion/length_correct_mean"] == 4  # all three reach the documented 0.5
    assert "completion/length_wrong_mean" not in row


def test_the_total_is_the_weighted_sum_and_the_parts_are_not(synthetic: ModuleType) -> None:
    group = synthetic.finished_group(0, [0.1 * 1 + 0.9 * 1], [3], parts={"format": (1.0,), "answer": (1.0,)})
    row = group_metrics([group])
    assert row["reward/mean"] == pytest.approx(1.0)
    assert row["reward/format/mean"] == row["reward/answer/mean"] == 1.0


def test_lengths_are_paired_with_the_rewards_of_their_own_group(synthetic: ModuleType) -> None:
    first = synthetic.finished_group(0, [0.0, 1.0], [100, 200])
    second = synthetic.finished_group(1, [1.0, 0.0], [5, 9])
    assert group_metrics([second])["completion/length_correct_mean"] == 5
    row = group_metrics([second, first])
    assert row["completion/length_correct_mean"] == (200 + 5) / 2
    assert row["completion/length_wrong_mean"] == (100 + 9) / 2


def test_means_are_over_samples_and_maxima_over_groups(synthetic: ModuleType) -> None:
    groups = [
        synthetic.finished_group(0, [1.0], [3], repeat=1.0),
        synthetic.finished_group(1, [0.0] * 9, [7] * 9, repeat=0.0),
    ]
    row = group_metrics(groups)
    assert row["reward/mean"] == pytest.approx(0.1)
    assert row["completion/repeat_fraction"] == pytest.approx(0.1)
    assert row["completion/length_max"] == 7
    assert row["tokens/generated"] == 66


def test_dropped_groups_count_for_the_mean_and_not_for_the_trained_mean(synthetic: ModuleType) -> None:
    groups = [
        synthetic.finished_group(0, [1.0, 0.0], reason=None),
        synthetic.finished_group(1, [1.0, 1.0], reason="equal_rewards"),
        synthetic.finished_group(2, [0.0, 0.0], reason="equal_rewards"),
        synthetic.finished_group(
            3, [], [], reason="error: timed out", version_min=-1, unique=math.nan, repeat=math.nan
        ),
    ]
    row = group_metrics(groups, version=0)
    assert row["reward/mean"] == 0.5
    assert row["reward/trained_mean"] == 0.5
    assert [row[f"groups/{key}"] for key in ("generated", "trained", "solved_all", "solved_none", "error")] == [
        4,
        1,
        1,
        1,
        1,
    ]
    assert row["groups/dropped/equal_rewards"] == 2
    assert row["groups/dropped/error"] == 1
    assert all(math.isfinite(value) for value in row.values())


def test_a_group_that_is_right_throughout_but_unequal_is_not_solved(synthetic: ModuleType) -> None:
    row = group_metrics([synthetic.finished_group(0, [0.9, 1.0])])
    assert (row["groups/solved_all"], row["groups/solved_none"]) == (0, 0)


def test_unscored_samples_have_a_length_and_no_reward(synthetic: ModuleType) -> None:
    row = group_metrics([synthetic.finished_group(0, [None, 1.0], [10, 2], truncated=[True, False])])
    assert row["reward/mean"] == 1.0
    assert "reward/std" not in row  # one reward has no spread
    assert row["completion/length_mean"] == 6
    assert row["completion/truncated_fraction"] == 0.5
    assert row["completion/length_correct_mean"] == 2


def test_what_was_not_measured_has_no_key() -> None:
    assert group_metrics([], version=3) == {
        "tokens/generated": 0,
        "groups/generated": 0,
        "groups/trained": 0,
        "groups/solved_all": 0,
        "groups/solved_none": 0,
        "groups/error": 0,
    }


def test_staleness_is_the_learners_version_minus_the_oldest_of_each_trained_group(synthetic: ModuleType) -> None:
    groups = [
        synthetic.finished_group(0, [1.0, 0.0], version_min=5),
        synthetic.finished_group(1, [1.0, 0.0], version_min=2),
        synthetic.finished_group(2, [1.0, 1.0], version_min=0, reason="equal_rewards"),
    ]
    row = group_metrics(groups, version=6)
    assert (row["staleness/mean"], row["staleness/max"]) == (2.5, 4)
    assert "staleness/mean" not in group_metrics(groups)


@given(st.lists(st.lists(st.floats(-3, 3), min_size=1, max_size=4), min_size=1, max_size=6), st.randoms())
def test_the_order_in_which_groups_finished_does_not_matter(rewards: list[list[float]], random: Random) -> None:
    groups = [make(i, list(values), [i + 1] * len(values)) for i, values in enumerate(rewards)]
    shuffled = list(groups)
    random.shuffle(shuffled)
    assert group_metrics(groups, 1) == group_metrics(shuffled, 1)


def test_reasons_are_read_up_to_their_detail() -> None:
    assert reason_kind("error: reward.py raised / line 3") == "error"
    assert reason_kind("Equal rewards") == "equal_rewards"
    assert reason_kind(": nothing") == "other"
    assert [is_error(reason) for reason in (None, "equal_rewards", "dead: 3 tries", "error")] == [
        False,
        False,
        True,
        True,
    ]


def test_throughput_counts_every_sample_over_the_whole_step(synthetic: ModuleType) -> None:
    groups = [
        synthetic.finished_group(0, [1.0, 0.0], [10, 30]),
        synthetic.finished_group(1, [1.0], [20], reason="error"),
    ]
    assert throughput_metrics(groups, 2.0) == {"throughput/samples_per_s": 1.5, "throughput/tokens_per_s": 30.0}
    assert throughput_metrics(groups, 0.0) == {}


def test_observing_imports_no_torch() -> None:
    import subprocess
    import sys

    modules = sorted(path.stem for path in Path(__file__).parents[2].joinpath("miles/observe").glob("[a-z]*.py"))
    code = f"import sys\nfor m in {modules}: __import__('miles.observe.' + m)\nprint('torch' in sys.modules, 'numpy' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]
