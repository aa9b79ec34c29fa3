from __future__ import annotations

from dataclasses import replace

import pytest

from miles.algo import AlgorithmRow
from miles.rollout.filters import drop_reason
from miles.types import Group, Sample

PLAIN = AlgorithmRow("plain", "raw", "broadcast", "reinforce", "test")
CENTRED = replace(PLAIN, group_centred=True)
DAPO = replace(CENTRED, drop_equal_rewards=True)
REMAX = replace(PLAIN, greedy_baseline=True)


def group(*rewards: float | None, baseline: float | None = None) -> Group:
    return Group(0, 0, tuple(Sample((), "stop", "", reward=r) for r in rewards), baseline_reward=baseline)


@pytest.mark.parametrize(
    ("row", "rewards", "reason"),
    [
        (PLAIN, (None, None), "unscored"),
        (PLAIN, (None, 0.0), None),
        (CENTRED, (None, 0.0), "unscored"),
        (CENTRED, (None, 0.0, 1.0), None),
        (CENTRED, (1.0, 1.0), None),
        (DAPO, (1.0, 1.0, 1.0), "equal_rewards"),
        (DAPO, (0.0, None, 0.0), "equal_rewards"),
        (DAPO, (0.0, None, 1e-9), None),
        (DAPO, (None, 1.0), "unscored"),
        (REMAX, (1.0, 0.0), "unscored"),
    ],
)
def test_reasons(row, rewards, reason):
    assert drop_reason(group(*rewards), row) == reason


def test_a_scored_baseline_is_enough_for_remax():
    assert drop_reason(group(1.0, 0.0, baseline=0.5), REMAX) is None
