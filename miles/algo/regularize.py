"""KL to the reference and its adaptive strength.

d = log pi - log ref. As a loss, differentiated per token on samples of pi: k1 has zero expected gradient, k2 the
reverse KL's, k3 the forward KL's, k3_weighted and k3_k2 the reverse KL's (arXiv:2506.09477, arXiv:2510.01555). d is clamped to
+-20 and k3 to 10, beyond which they hold still; the metric `kl/ref` is not clamped.
"""

from __future__ import annotations

from torch import Tensor

from miles.algo.losses import bounded_exp

D_BOUND = 20.0
K3_BOUND = 10.0


def k1(d: Tensor) -> Tensor:
    """d.  Schulman, "Approximating KL divergence" (2020)."""
    return d


def k2(d: Tensor) -> Tensor:
    """d^2 / 2.  Schulman, "Approximating KL divergence" (2020)."""
    return d**2 / 2


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d, never negative.  Schulman (2020); GRPO's KL, arXiv:2402.03300, eq. 4."""
    return (-d).expm1() + d  # exact near 0, where exp - 1 loses every digit


def kl_loss(estimator: str, logprobs: Tensor, ref_logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """[T] float32 with gradient to `logprobs`: the KL loss per token, by the name of its estimator.

    k3_weighted is r * k3, r = pi/sg[old], whose gradient r*d is the reverse KL's also after several updates
    (DeepSeek-V3.2, arXiv:2512.02556, section 3.1); clamping it never keeps only one half of that gradient. k3_k2 has the
    value of k3 and the gradient of k2. Raises ValueError for another name.
    """
    d = (logprobs - ref_logprobs).clamp(-D_BOUND, D_BOUND)
    if estimator == "k1":
        return k1(d)
    if estimator == "k2":
        return k2(d)
    if estimator == "k3":
        return k3(d).clamp(max=K3_BOUND)
    if estimator == "k3_weighted":
        ratio = bounded_exp(logprobs.detach() - old_logprobs)
        value = ratio * k3(d.detach()).clamp(max=K3_BOUND)
        return straight_through(value, ratio * d.detach() * logprobs)
    if estimator == "k3_k2":
        return straight_through(k3(d.detach()).clamp(max=K3_BOUND), k2(d))
    raise ValueError(f'there is no KL estimator "{estimator}": use k1, k2, k3, k3_weighted or k3_k2')


def straight_through(value: Tensor, surrogate: Tensor) -> Tensor:
    """The value of the one, the gradient of the other."""
    return value.detach() + (surrogate - surrogate.detach())


def adapt_beta(beta: float, kl: float, target: float, samples: int, horizon: int) -> float:
    """beta * (1 + clip(KL/target - 1, -0.2, 0.2) * samples/horizon).  Ziegler et al., arXiv:1909.08593, section 2.2.

    kl: the step's mean of kl/ref over trained tokens; samples: samples of the step.
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * samples / horizon)


def value_regularizer(values: Tensor, ref_values: Tensor) -> Tensor:
    """[T] 0.5 * (v - v_ref)^2, what holds a critic near the one that its run began with."""
    return 0.5 * (values - ref_values) ** 2
