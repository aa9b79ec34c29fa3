"""Weights that correct for the engine having sampled from another policy than the one the step starts from.

w = old/mu per token, or its product over a sample; mu is the behavior policy. A token whose weight is 0 stays in the
loss's denominator.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.algo.losses import bounded_exp
from miles.algo.rules import GEOMETRIC_MIN_TOKENS, mask_bounds

TOKEN_KINDS = ("truncate", "mask")


def token_weights(
    old_logprobs: Tensor, behavior_logprobs: Tensor, kind: str, cap: float, low: float | None, high: float | None
) -> Tensor:
    """[M] float32 without gradient, for M tokens in any order.

    truncate: min(w, cap) (truncated importance sampling, Ionides 2008). mask: w inside [low, high], 0 outside (IcePop,
    arXiv:2510.18855, section 2.3).
    """
    weights = bounded_exp((old_logprobs - behavior_logprobs).detach())
    if kind == "truncate":
        return weights.clamp(max=cap)
    low, high = mask_bounds(kind, low, high)
    return torch.where((weights >= low) & (weights <= high), weights, 0.0)


def sequence_weights(
    old_logprobs: Tensor,
    behavior_logprobs: Tensor,
    sample_ids: Tensor,
    lengths: Tensor,
    kind: str,
    cap: float,
    low: float | None,
    high: float | None,
) -> Tensor:
    """[N] float32 without gradient, one weight a sample, for the N trained tokens of the step.

    sample_ids: [N] int64; lengths: [S] int64. With W the product of w over the sample's tokens:
    sequence_truncate: min(W, cap). sequence_mask_product: 1 where W is inside [low, high], else 0.
    sequence_mask_geometric: 1 where W^(1/length) is inside [low, high], else 0; 1 for samples of fewer than 256 tokens.
    Masking whole sequences: arXiv:2512.23075.
    """
    log_ratio = (old_logprobs - behavior_logprobs).detach().double()
    log_product = log_ratio.new_zeros(len(lengths)).index_add(0, sample_ids, log_ratio)
    if kind == "sequence_truncate":
        weights = bounded_exp(log_product).clamp(max=cap)
    else:
        low, high = mask_bounds(kind, low, high)
        geometric = kind == "sequence_mask_geometric"
        value = bounded_exp(log_product / lengths.clamp(min=1) if geometric else log_product)
        keep = (value >= low) & (value <= high)
        weights = (keep | (lengths < GEOMETRIC_MIN_TOKENS) if geometric else keep).double()
    return weights[sample_ids].float()
