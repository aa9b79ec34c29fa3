"""Decides which finished groups are not worth training on, and says why."""

from __future__ import annotations

from miles.algo import AlgorithmRow
from miles.types import Group

UNSCORED = "unscored"
EQUAL_REWARDS = "equal_rewards"
ERROR = "error"


def drop_reason(group: Group, row: AlgorithmRow) -> str | None:
    """Why the algorithm's row cannot or will not use the group; None: it is trained.

    `unscored`: fewer scored samples than the row's credit needs (2 where it compares the samples of a group, else 1),
    or no score for the greedy baseline it subtracts. `equal_rewards`: the row drops groups whose unshaped rewards are
    all equal (DAPO, arXiv:2503.14476, equation 11).
    """
    scored = [reward for reward in group.rewards if reward is not None]
    if len(scored) < row.min_group_size:
        return UNSCORED
    if row.greedy_baseline and group.baseline_reward is None:
        return UNSCORED
    if row.drop_equal_rewards and max(scored) == min(scored):
        return EQUAL_REWARDS
    return None
