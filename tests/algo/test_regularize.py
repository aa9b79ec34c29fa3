"""KL estimators: value and gradient by hand, and what each one's gradient is in expectation."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from miles.algo.regularize import adapt_beta, k3, kl_loss, straight_through, value_regularizer
from miles.config.schema import Algorithm

NAMES = [n for a in get_args(Algorithm.model_fields["kl_estimator"].annotation) for n in get_args(a)]


def value_and_slope(name, logprob, ref, old=None):
    x = torch.tensor([logprob], requires_grad=True)
    old = torch.tensor([logprob if old is None else old])
    out = kl_loss(name, x, torch.tensor([ref]), old)
    out.sum().backward()
    return out.item(), x.grad.item()


@pytest.mark.parametrize(
    ("name", "value", "slope"),
    [
        ("k1", 1.0, 1.0),
        ("k2", 0.5, 1.0),
        ("k3", 0.36788, 0.63212),
        ("k3_weighted", 0.36788, 1.0),
        ("k3_k2", 0.36788, 1.0),
    ],
)
def test_by_hand(name, value, slope):
    assert value_and_slope(name, -1.0, -2.0) == pytest.approx((value, slope), abs=1e-5)


def test_k3_of_nearly_equal_policies_keeps_its_digits_and_its_sign():
    d = torch.tensor([0.0, 1e-4, -1e-4, 1e-6])
    assert k3(d).tolist() == pytest.approx([0.0, 5e-9, 5e-9, 5e-13], rel=1e-3, abs=1e-13)
    assert (k3(d) >= 0).all()


def test_every_name_of_the_recipe_runs():
    assert len(NAMES) == 5
    for name in NAMES:
        assert all(math.isfinite(x) for x in value_and_slope(name, -1.0, -1.5))
    with pytest.raises(ValueError, match='no KL estimator "k9"'):
        value_and_slope("k9", -1.0, -1.5)


def test_weighted_k3_follows_the_ratio_after_several_updates():
    value, slope = value_and_slope("k3_weighted", -1.0, -2.0, old=-1.5)
    ratio = math.exp(0.5)
    assert (value, slope) == pytest.approx((ratio * 0.36788, ratio * 1.0), abs=1e-4)


def test_clamps_keep_extremes_finite_and_never_half_a_gradient():
    for name in NAMES:
        for logprob, ref in ((-200.0, 0.0), (0.0, -200.0)):
            assert all(math.isfinite(x) for x in value_and_slope(name, logprob, ref, old=-1.0))
    assert value_and_slope("k3", -5.0, -1.0) == (10.0, 0.0)
    value, slope = value_and_slope("k3_weighted", -5.0, -1.0)
    assert (value, slope) == pytest.approx((10.0, -4.0))


def expected_gradient(name, logits, ref_logits):
    """Exact expectation over a small categorical policy of the per-token loss's gradient."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    loss = kl_loss(name, logprobs, ref_logits.log_softmax(0), logprobs.detach())
    (logprobs.detach().exp() * loss).sum().backward()
    return logits.grad


def test_expected_gradients_are_the_ones_the_docs_name():
    logits, ref = torch.tensor([0.3, -0.5, 0.9, 0.1]), torch.tensor([-0.2, 0.4, 0.0, 0.5])
    x = logits.clone().requires_grad_()
    p, q = x.log_softmax(0), ref.log_softmax(0)
    (reverse,) = torch.autograd.grad((p.exp() * (p - q)).sum(), x, retain_graph=True)
    (forward,) = torch.autograd.grad((q.exp() * (q - p)).sum(), x)
    assert expected_gradient("k1", logits, ref).abs().max() < 1e-6
    for name in ("k2", "k3_weighted", "k3_k2"):
        assert torch.allclose(expected_gradient(name, logits, ref), reverse, atol=1e-6), name
    assert torch.allclose(expected_gradient("k3", logits, ref), forward, atol=1e-6)
    assert not torch.allclose(reverse, forward, atol=1e-3)


def test_straight_through_has_the_value_of_one_and_the_gradient_of_the_other():
    x = torch.tensor(2.0, requires_grad=True)
    out = straight_through(x * 0 + 7, x**2)
    out.backward()
    assert (out.item(), x.grad.item()) == (7.0, 4.0)


def test_beta_follows_its_target_by_a_fifth_at_most():
    assert adapt_beta(0.1, kl=0.2, target=0.1, samples=1000, horizon=10000) == pytest.approx(0.1 * 1.02)
    assert adapt_beta(0.1, kl=0.0, target=0.1, samples=1000, horizon=10000) == pytest.approx(0.1 * 0.98)
    assert adapt_beta(0.1, kl=0.11, target=0.1, samples=1000, horizon=10000) == pytest.approx(0.1 * 1.01)
    assert adapt_beta(0.1, kl=0.1, target=0.1, samples=1000, horizon=10000) == 0.1


def test_the_value_regularizer_is_half_the_square_and_pulls_back():
    values = torch.tensor([0.5, -1.0], requires_grad=True)
    out = value_regularizer(values, torch.tensor([0.0, 1.0]))
    out.sum().backward()
    assert out.tolist() == [0.125, 2.0]
    assert values.grad.tolist() == [0.5, -2.0]
