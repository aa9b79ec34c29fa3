"""An algorithm of your own, in a file of your own: a clipped policy gradient whose clip has no edge.

Use it from any recipe, without touching Miles:

    [algorithm]
    name = "examples/own_algorithm.py:SOFT_CLIP"

or from Python: `miles.train(..., algorithm="examples/own_algorithm.py:SOFT_CLIP")`. The path is relative to the folder
you start the run from. docs/algorithms.md says what each function may be given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from miles.algo import AlgorithmRow

if TYPE_CHECKING:  # `miles check` reads this file too, and stays fast because only the functions load torch
    from torch import Tensor

    from miles.algo.losses import TokenLoss
    from miles.algo.tokens import TokenSignal


def soft_clipped(
    logprobs: Tensor, signal: TokenSignal, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> TokenLoss:
    """-A * 4/tau * sigmoid(tau * (r - 1)): the gradient fades smoothly as the ratio leaves 1, and is A at r = 1.

    SAPO, arXiv:2511.20347, section 3. tau is larger for tokens that are pushed down.

    logprobs: [T] with gradient; signal: the step's data at the same tokens. Returns one loss a token; Miles masks, weighs
    and sums.
    """
    import torch

    from miles.algo.losses import TokenLoss, bounded_exp

    ratio = bounded_exp(logprobs - signal.old_logprobs)
    tau = torch.where(signal.advantages > 0, tau_positive, tau_negative)
    gate = 4 / tau * torch.sigmoid(tau * (ratio - 1))
    return TokenLoss(-signal.advantages * gate, {"ratio": ratio.detach(), "gate": gate.detach()})


SOFT_CLIP = AlgorithmRow(
    name="soft_clip",
    credit="group_standardized",  # a name: one of ours
    advantage="broadcast",
    policy_loss=soft_clipped,  # a function: yours
    source="SAPO, arXiv:2511.20347",
    defaults={"scale_std": True, "reduction": "sequence_mean"},  # keys of [algorithm] that the row reads
    group_centred=True,  # needs at least two samples a prompt
)
