"""Advantages: one number a trained token, made of the samples' credit.

Every function has the signature `(table, credit, scores, *, settings) -> Advantages`:

- table: the step's `StepTable`, N trained tokens of S samples
- credit: [S] float32
- scores: `StepScores`, what the forwards before the update gave

The table holds trained tokens only, so nothing here sees prompt, tool or padding tokens. The end of a sample is
terminal, also where it was truncated: no value is bootstrapped from beyond it. Sums run in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.types import StepTable

WHITEN_EPS = 1e-8
"""Added to the variance under the root."""


@dataclass(frozen=True)
class StepScores:
    """Per-token results of the forwards before the first update. `beta` is the strength of the KL in the reward."""

    old_logprobs: Tensor | None = None  # [N] float32
    ref_logprobs: Tensor | None = None  # [N] float32
    values: Tensor | None = None  # [N] float32, value of the state before the token
    beta: float = 0.0  # 0: no KL in the reward


@dataclass(frozen=True)
class Advantages:
    """What the actor and the critic are trained towards."""

    advantages: Tensor  # [N] float32
    returns: Tensor | None = None  # [N] float32, the critic's targets


def broadcast(table: StepTable, credit: Tensor, scores: StepScores) -> Advantages:
    """A_t = A_i for every trained token of sample i.  GRPO, arXiv:2402.03300, section 4.1.2."""
    return Advantages(credit[table.sample_ids].float())


def broadcast_whitened(table: StepTable, credit: Tensor, scores: StepScores) -> Advantages:
    """Broadcast, then whitened over all trained tokens of the step.  REINFORCE++ with baseline, arXiv:2501.03262."""
    return Advantages(whiten(credit[table.sample_ids]))


def token_returns(table: StepTable, credit: Tensor, scores: StepScores, *, gamma: float = 1.0) -> Advantages:
    """A_t = sum_{s >= t} gamma^(s-t) * r_s, whitened over the step; r as in `token_rewards`.

    REINFORCE++, arXiv:2501.03262, section 3.
    """
    rewards = token_rewards(table, credit, scores)
    return Advantages(whiten(_discounted_sum(rewards, table, _per_token(gamma, rewards))))


def gae(table: StepTable, credit: Tensor, scores: StepScores, *, gamma: float = 1.0, lam: float = 0.95) -> Advantages:
    """A_t = sum_k (gamma * lam)^k * delta_{t+k}, delta_t = r_t + gamma * V_{t+1} - V_t; returns = A + V, then whitened A.

    GAE, arXiv:1506.02438, eq. 16; r as in `token_rewards`.
    """
    values = _values(scores)
    advantages = _gae(table, credit, scores, gamma, _per_token(lam, values))
    return Advantages(whiten(advantages), (advantages + values).float())


def length_adaptive_gae(
    table: StepTable,
    credit: Tensor,
    scores: StepScores,
    *,
    gamma: float = 1.0,
    lam: float | None = None,
    vapo_alpha: float = 0.05,
) -> Advantages:
    """GAE with lambda = clamp(1 - 1/(alpha * L), 0, 1) for the actor (L: the sample's trained tokens), 1 for the critic.

    VAPO, arXiv:2504.05118, section 4.2 (decoupled and length-adaptive GAE). The critic's targets come from a
    second pass at lambda 1, never from the actor's advantages. A given `lam` replaces the length rule.
    """
    values = _values(scores)
    per_sample = length_adaptive_lambda(table.lengths, vapo_alpha)
    actor_lam = per_sample[table.sample_ids] if lam is None else _per_token(lam, values)
    actor = _gae(table, credit, scores, gamma, actor_lam)
    critic = _gae(table, credit, scores, gamma, _per_token(1.0, values))
    return Advantages(whiten(actor), (critic + values).float())


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """[S] int64 -> [S] float64, clamp(1 - 1/(alpha * L), 0, 1).  VAPO, arXiv:2504.05118, section 4.2."""
    return (1 - 1 / (alpha * lengths.double().clamp(min=1))).clamp(0, 1)


def token_rewards(table: StepTable, credit: Tensor, scores: StepScores) -> Tensor:
    """[N] float64, r_t = -beta * (log pi_old - log pi_ref)_t, plus the sample's reward on its last trained token.

    The KL is k1, fixed for the step and without gradient.  Ziegler et al., arXiv:1909.08593, eq. 2; PPO for language
    models, arXiv:2203.02155.
    """
    rewards = torch.zeros(len(table.sample_ids), dtype=torch.float64, device=credit.device)
    if scores.beta:
        if scores.old_logprobs is None or scores.ref_logprobs is None:
            raise ValueError("a KL in the reward needs old_logprobs and ref_logprobs of the step's table")
        rewards -= scores.beta * (scores.old_logprobs.detach().double() - scores.ref_logprobs.detach().double())
    trained = table.lengths > 0
    last = (table.starts + table.lengths - 1)[trained]
    return rewards.index_add(0, last, credit.double()[trained])


def monte_carlo_returns(table: StepTable, credit: Tensor, scores: StepScores, gamma: float = 1.0) -> Tensor:
    """[N] float32, the discounted sum of the token rewards to the sample's end, without any value."""
    rewards = token_rewards(table, credit, scores)
    return _discounted_sum(rewards, table, _per_token(gamma, rewards)).float()


def whiten(values: Tensor) -> Tensor:
    """[N] -> [N] float32, (x - mean) / sqrt(var + 1e-8) over all N, population variance."""
    x = values.double()
    centred = x - x.sum() / max(len(x), 1)
    variance = (centred**2).sum() / max(len(x), 1)
    return (centred / (variance + WHITEN_EPS).sqrt()).float()


def masked_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> Tensor:
    """GAE of one sequence whose untrained tokens still stand in it: [T] rewards, values and mask -> [T] float32.

    Right to left, `nextV` and `A` carry over untrained tokens unchanged, which equals deleting those tokens first. The
    result is 0 on them; what rewards and values hold there is not read.
    """
    trained = mask.nonzero()[:, 0]
    lengths = torch.tensor([len(trained)], device=mask.device)
    kept_rewards, kept_values = rewards[trained].double(), values[trained].double()
    ends = lengths.repeat(len(trained))
    advantages = _gae_scan(kept_rewards, kept_values, ends, gamma, _per_token(lam, kept_values))
    return torch.zeros(len(mask), dtype=torch.float32, device=mask.device).index_copy(0, trained, advantages.float())


def _values(scores: StepScores) -> Tensor:
    if scores.values is None:
        raise ValueError("this advantage needs the critic's values of the step's table")
    return scores.values.detach().double()


def _gae(table: StepTable, credit: Tensor, scores: StepScores, gamma: float, lam: Tensor) -> Tensor:
    """[N] float64, not whitened. lam: [N] float64."""
    return _gae_scan(token_rewards(table, credit, scores), _values(scores), _ends(table), gamma, lam)


def _gae_scan(rewards: Tensor, values: Tensor, ends: Tensor, gamma: float, lam: Tensor) -> Tensor:
    place = torch.arange(len(values), device=values.device)
    next_values = torch.where(place + 1 < ends, values.roll(-1), 0.0)
    return _scan(rewards + gamma * next_values - values, ends, gamma * lam)


def _discounted_sum(rewards: Tensor, table: StepTable, decay: Tensor) -> Tensor:
    return _scan(rewards, _ends(table), decay)


def _ends(table: StepTable) -> Tensor:
    """[N] int64, the row after the last one of the token's sample."""
    return (table.starts + table.lengths)[table.sample_ids]


def _per_token(value: float, like: Tensor) -> Tensor:
    return torch.full_like(like, value, dtype=torch.float64)


def _scan(x: Tensor, ends: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_t * y_{t+1} within each sample, in log2(longest sample) doublings instead of one step a token.

    [N] float64 each; decay is the same for all tokens of a sample. After round k, y holds sums of 2^k terms.
    """
    place = torch.arange(len(x), device=x.device)
    longest = int((ends - place).max()) if len(x) else 0
    step = 1
    while step < longest:
        ahead = place + step
        x = x + torch.where(ahead < ends, decay * x[ahead.clamp(max=len(x) - 1)], 0.0)
        decay, step = decay * decay, step * 2
    return x
