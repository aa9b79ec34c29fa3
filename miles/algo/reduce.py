"""How token losses become one number: each trained token's weight in the sum over the whole update.

The weights are counted once for an update, over all of its batches and ranks, so loss = sum(weight * token loss) and
its gradient do not depend on micro-batches, packing or the number of ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

CORRECT_REWARD = 0.5
"""A sample counts as correct when its unshaped reward is at least this."""


def loss_weights(sample_ids: Tensor, lengths: Tensor, update: Tensor, reduction: str, max_new_tokens: int) -> Tensor:
    """[N] float32, the weight of each token of the step's table in one update; 0 for tokens of other updates.

    sample_ids: [N] int64; lengths: [S] int64, trained tokens of each sample; update: [S'] int64, the update's samples.
    With S the update's samples that have a trained token, and c_i a sample's trained tokens:

    - token_mean: 1/sum(c_i).  DAPO, arXiv:2503.14476, eq. 8.
    - sequence_mean: 1/(c_i * S).  GRPO, arXiv:2402.03300, eq. 3.
    - constant: 1/(S * max_new_tokens).  Dr. GRPO, arXiv:2503.20783, appendix A.

    An update without a trained token has only zeros. Raises ValueError for another reduction.
    """
    chosen = torch.zeros(len(lengths), dtype=torch.bool, device=lengths.device)
    chosen[update] = True
    counts = torch.where(chosen, lengths, 0).double()
    samples = (counts > 0).sum().clamp(min=1)
    if reduction == "token_mean":
        per_sample = 1 / counts.sum().clamp(min=1).expand(len(lengths))
    elif reduction == "sequence_mean":
        per_sample = 1 / (counts.clamp(min=1) * samples)
    elif reduction == "constant":
        per_sample = 1 / (samples * max_new_tokens).double().expand(len(lengths))
    else:
        raise ValueError(f'there is no reduction "{reduction}": use token_mean, sequence_mean or constant')
    return torch.where(chosen, per_sample, 0.0)[sample_ids].float()


def correct_samples(unshaped_rewards: Tensor) -> Tensor:
    """[S] bool, True where the sample solved its prompt."""
    return unshaped_rewards >= CORRECT_REWARD
