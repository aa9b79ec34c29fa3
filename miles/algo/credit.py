"""Credit: one number a sample, made of the step's rewards.

Every function has the signature `(rewards, group_ids, lengths, baseline_rewards, *, settings) -> credit`:

- rewards: [S] float32, shaped, one for each sample of the step that is trained
- group_ids: [S] int64, which group the sample belongs to (the samples of one prompt; any integers)
- lengths: [S] int64, trained tokens of the sample, over all of its segments
- baseline_rewards: [S] float32, reward of the prompt's greedy completion, NaN where there is none
- credit: [S] float32

Sums and means are taken in float64. Group-centred functions give exactly 0 to a group whose rewards are all equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.errors import RewardError

STD_EPS = 1e-6
"""Added to the group's standard deviation before dividing by it."""


@dataclass(frozen=True)
class _Groups:
    """Sums over groups: G groups, S samples."""

    index: Tensor  # [S] int64, 0..G-1
    size: Tensor  # [S] float64, samples in the sample's group

    @classmethod
    def of(cls, group_ids: Tensor) -> _Groups:
        _, index, counts = torch.unique(group_ids, return_inverse=True, return_counts=True)
        return cls(index, counts.to(torch.float64)[index])

    def sum(self, values: Tensor) -> Tensor:
        """[S] float64 -> [S] float64, the sum over the sample's group."""
        return values.new_zeros(len(values)).index_add_(0, self.index, values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        return self.sum(values) / self.size

    def all_equal(self, values: Tensor) -> Tensor:
        """[S] bool, True where the values of the sample's group are all the same (max == min)."""
        empty = values.new_zeros(len(values))
        highest = empty.scatter_reduce(0, self.index, values, "amax", include_self=False)
        lowest = empty.scatter_reduce(0, self.index, values, "amin", include_self=False)
        return (highest == lowest)[self.index]

    def centred(self, values: Tensor) -> Tensor:
        """values - their group's mean, and exactly 0 where they are all equal."""
        return torch.where(self.all_equal(values), 0.0, values - self.mean(values))


def group_standardized(
    rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor, *, scale_std: bool = True
) -> Tensor:
    """A_i = (R_i - mean_g) / (std_g + 1e-6), sample std (n - 1).  GRPO, arXiv:2402.03300, section 4.1.2.

    `scale_std = False` leaves the division out (Dr. GRPO, arXiv:2503.20783).
    """
    values, groups = rewards.double(), _Groups.of(group_ids)
    centred = groups.centred(values)
    if not scale_std:
        return centred.float()
    variance = groups.sum(centred**2) / (groups.size - 1).clamp(min=1)
    return (centred / (variance.sqrt() + STD_EPS)).float()


def group_centred(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """A_i = R_i - mean_g.  Dr. GRPO, arXiv:2503.20783, section 3.2."""
    return _Groups.of(group_ids).centred(rewards.double()).float()


def leave_one_out(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """A_i = R_i - mean of the others = n/(n-1) * (R_i - mean_g).  RLOO, arXiv:2402.14740, section 3.

    A sample without others has no baseline: 0.
    """
    groups = _Groups.of(group_ids)
    return (groups.centred(rewards.double()) * groups.size / (groups.size - 1).clamp(min=1)).float()


def group_maxrl(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """A_i = (R_i - mean_g) / mean_g, and 0 where mean_g = 0.  MaxRL, arXiv:2602.02710.

    Raises RewardError for negative rewards, with which the mean is no success rate.
    """
    if bool((rewards < 0).any()):
        raise RewardError(
            f"maxrl divides by the group's mean reward and needs rewards >= 0, got {rewards.min().item():g}: shift the "
            "reward, or choose algorithm.name = grpo."
        )
    values, groups = rewards.double(), _Groups.of(group_ids)
    mean = groups.mean(values)
    return torch.where(mean > 0, groups.centred(values) / torch.where(mean > 0, mean, 1.0), 0.0).float()


def group_optimal_baseline(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """A_i = R_i - sum_j(len_j * R_j) / sum_j(len_j) over the group.  OPO, arXiv:2505.23585, section 3."""
    values, weights, groups = rewards.double(), lengths.double(), _Groups.of(group_ids)
    baseline = groups.sum(weights * values) / groups.sum(weights).clamp(min=1)
    return torch.where(groups.all_equal(values), 0.0, values - baseline).float()


def step_centred(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """A_i = R_i - mean over all samples of the step.  REINFORCE with a batch baseline (Williams 1992, section 4)."""
    values = rewards.double()
    return (values - values.sum() / max(len(values), 1)).float()


def greedy_centred(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """A_i = R_i - R(greedy completion of the prompt).  ReMax, arXiv:2310.10505, algorithm 1.

    Raises RewardError where the greedy completion has no reward.
    """
    missing = baseline_rewards.isnan()
    if bool(missing.any()):
        group = group_ids[missing][0].item()
        raise RewardError(
            f"group {group} has no reward of the prompt's greedy completion, which remax subtracts: the reward function "
            "must score it, or the group must be dropped."
        )
    return (rewards.double() - baseline_rewards.double()).float()


def pair_side(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """+1 for the better answer of a pair and -1 for the other; which is better stands in the rewards, 1 and 0."""
    return _Groups.of(group_ids).centred(rewards.double()).sign().float()


def reward(rewards: Tensor, group_ids: Tensor, lengths: Tensor, baseline_rewards: Tensor) -> Tensor:
    """A_i = R_i: the baseline is the critic's, or the whitening's (PPO, REINFORCE++)."""
    return rewards.float()
