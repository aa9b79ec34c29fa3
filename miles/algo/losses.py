"""Token losses of the actor and the critic: the formula of each algorithm, before weights, reduction and KL.

Policy losses have the signature `(logprobs, signal, *, settings) -> TokenLoss`, value losses `(values, signal, *,
settings) -> TokenLoss`, losses of a scorer `(scores, signal, *, settings) -> TokenLoss`:

- logprobs: [T] float32 with gradient, log pi(token[t] | tokens before t) now; values: [T] float32 with gradient
- scores: [T] float32 with gradient, the score of a sequence at its one trained place; 0 elsewhere
- signal: `TokenSignal` of the batch; `old_logprobs` is always there for a policy loss of sampled answers

Inputs are finite off the mask (0), so functions need not select; results off the mask are not read. Symbols:
r = pi/old, mu = the behavior policy, A = advantage, sg[.] = no gradient. Log-ratios are clamped to +-20 before exp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import softplus

from miles.algo.tokens import TokenSignal, select

LOG_RATIO_BOUND = 20.0
"""exp(20) is 5e8: no honest ratio is larger, and none overflows."""


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token. `metrics` are [T], detached; `ratio` and `clipped` become ratio/* in the metrics row."""

    loss: Tensor  # [T] float32
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(clamp(log_ratio, -20, 20)): finite; no gradient beyond the bound."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def reinforce(logprobs: Tensor, signal: TokenSignal, *, ratio_cap: float = 2.0) -> TokenLoss:
    """-sg[min(pi/mu, cap)] * A * log pi.  Williams 1992, with a truncated weight to the policy that sampled."""
    ratio = bounded_exp(logprobs.detach() - signal.behavior_logprobs)
    loss = -ratio.clamp(max=ratio_cap) * signal.advantages * logprobs
    return TokenLoss(loss, {"ratio": ratio, "clipped": ratio > ratio_cap})


def clipped(
    logprobs: Tensor,
    signal: TokenSignal,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> TokenLoss:
    """max(-A*r, -A*clip(r, 1-lo, 1+hi)).  PPO, arXiv:1707.06347, eq. 7; two ends: DAPO, arXiv:2503.14476, eq. 8.

    dual_clip c: for A < 0 at most -c*A, arXiv:1912.09729, eq. 5.
    """
    ratio = bounded_exp(logprobs - _old(signal))
    return _clipped_surrogate(ratio, signal.advantages, clip_low, clip_high, dual_clip)


def gspo(
    logprobs: Tensor,
    signal: TokenSignal,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
) -> TokenLoss:
    """The clipped surrogate of one ratio a sequence, s = exp(mean_t(log pi - log old)), as sg[s] * pi/sg[pi] per token.

    GSPO, arXiv:2507.18071, section 4 (s_i, and the token form that gives each token its own gradient).
    """
    sequence = bounded_exp(sequence_mean(logprobs.detach() - _old(signal), signal))
    ratio = sequence * (logprobs - logprobs.detach()).exp()
    return _clipped_surrogate(ratio, signal.advantages, clip_low, clip_high, dual_clip)


def cispo(logprobs: Tensor, signal: TokenSignal, *, ratio_cap: float = 5.0) -> TokenLoss:
    """-sg[min(r, cap)] * A * log pi: a capped weight, and a gradient for every token.

    MiniMax-M1, arXiv:2506.13585, eq. 4.
    """
    ratio = bounded_exp(logprobs.detach() - _old(signal))
    loss = -ratio.clamp(max=ratio_cap) * signal.advantages * logprobs
    return TokenLoss(loss, {"ratio": ratio, "clipped": ratio > ratio_cap})


def dppo(logprobs: Tensor, signal: TokenSignal, *, ratio_cap: float = 20.0, mask_threshold: float = 0.2) -> TokenLoss:
    """-sg[keep * min(pi/mu, cap)] * A * log pi; keep while pi - mu <= threshold (A > 0) or >= -threshold (A < 0).

    DPPO, arXiv:2602.04879, the binary total-variation mask: a trust region in probability, not in the ratio.
    """
    ratio = bounded_exp(logprobs.detach() - signal.behavior_logprobs)
    moved = logprobs.detach().exp() - signal.behavior_logprobs.exp()
    up = (signal.advantages > 0) & (moved > mask_threshold)
    down = (signal.advantages < 0) & (moved < -mask_threshold)
    masked = up | down
    weight = torch.where(masked, 0.0, ratio.clamp(max=ratio_cap))
    return TokenLoss(-weight * signal.advantages * logprobs, {"ratio": ratio, "clipped": masked})


def likelihood(logprobs: Tensor, signal: TokenSignal) -> TokenLoss:
    """-log pi of each token of a recorded answer.  Supervised fine-tuning, arXiv:2203.02155, section 3.1."""
    return TokenLoss(-logprobs)


def bradley_terry(scores: Tensor, signal: TokenSignal, *, centre_coef: float = 0.0) -> TokenLoss:
    """-log sigmoid(r_c - r_r - m) + c * (r_c + r_r)^2 of a pair, on both of its places: their mean is the mean over pairs.

    r_c, r_r: scores of the chosen and the rejected answer.  InstructGPT, arXiv:2203.02155, eq. 1; the margin m of the
    row (0 where it has none): Llama 2, arXiv:2307.09288, eq. 2; the term that keeps scores around 0 (c = centre_coef):
    arXiv:2312.09244, eq. 2. Raises ValueError where a pair is split over batches.
    """
    if signal.group_ids is None:
        raise ValueError("the loss of pairs needs the group_ids of the step's table")
    groups, side = signal.group_ids, select(signal.advantages, signal.mask)
    size = int(groups.max()) + 1 if len(groups) else 0

    def of_pair(values: Tensor) -> Tensor:
        return values.new_zeros(size).index_add(0, groups, select(values, signal.mask))[groups]

    if bool((select(of_pair(torch.ones_like(scores)) - 2, signal.mask) != 0).any()):
        raise ValueError("a pair is split over batches: its loss needs both of its scores in one")
    gap = of_pair(side * scores)
    loss = softplus(-gap if signal.margins is None else signal.margins - gap)
    if centre_coef:
        loss = loss + centre_coef * of_pair(scores) ** 2
    right = (gap > 0).float() + 0.5 * (gap == 0).float()
    metrics = {"score": scores, "pair_gap": gap, "pair_right": right}
    return TokenLoss(loss, {name: value.detach() for name, value in metrics.items()})


def clipped_value(values: Tensor, signal: TokenSignal, *, value_clip: float | None = 0.2) -> TokenLoss:
    """0.5 * max((v - R)^2, (V_old + clip(v - V_old, -eps, eps) - R)^2).

    The value clip of PPO's reference code, described in arXiv:2005.12729, section 3. It presumes rewards of order 1;
    None: 0.5 * (v - R)^2.
    """
    old, returns = signal.values, signal.returns
    if old is None or returns is None:
        raise ValueError("the value loss needs the values and returns of the step's signal")
    if values.shape != returns.shape or values.shape != old.shape:
        raise ValueError(
            f"values {tuple(values.shape)}, old values {tuple(old.shape)} and returns {tuple(returns.shape)} must have "
            "one shape [T]: they would broadcast into a square"
        )
    plain = (values - returns) ** 2
    if value_clip is None:
        return TokenLoss(0.5 * plain, {"value_clipped": torch.zeros_like(plain)})
    bounded = (old + (values - old).clamp(-value_clip, value_clip) - returns) ** 2
    return TokenLoss(0.5 * torch.maximum(plain, bounded), {"value_clipped": (bounded > plain).detach()})


def sequence_mean(values: Tensor, signal: TokenSignal) -> Tensor:
    """[T] -> [T], the mean over the trained tokens of the token's sample (0 off the mask).

    Raises ValueError where a sample's trained tokens are not all in this batch: half a sample has no sequence mean.
    """
    index, rows = signal.sample_ids.clamp(min=0), max(signal.num_samples, 1)
    sums = values.new_zeros(rows).index_add(0, index, select(values, signal.mask))
    counts = signal.lengths.new_zeros(rows).index_add(0, index, signal.mask.to(signal.lengths.dtype))
    if bool((select(counts[index] - signal.lengths, signal.mask) != 0).any()):
        raise ValueError(
            "a sample is split over batches: a loss with one ratio a sequence needs all of its tokens in one"
        )
    return select(sums[index] / counts[index].clamp(min=1), signal.mask)


def _old(signal: TokenSignal) -> Tensor:
    if signal.old_logprobs is None:
        raise ValueError("a ratio needs old_logprobs: Objective.policy_loss puts the update's own forward there")
    return signal.old_logprobs


def _clipped_surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = torch.maximum(plain, bounded)
    metrics = {"ratio": ratio.detach(), "clipped": (bounded > plain).detach()}
    if dual_clip is not None:
        ceiling = -dual_clip * advantages
        metrics["dual_clipped"] = ((advantages < 0) & (loss > ceiling)).detach()
        loss = torch.where(advantages < 0, torch.minimum(loss, ceiling), loss)
    return TokenLoss(loss, metrics)
