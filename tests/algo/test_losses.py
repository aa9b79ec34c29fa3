"""Token losses by hand: value, gradient and metrics of each formula."""

from __future__ import annotations

import math

import pytest
import torch

from miles.algo import losses
from miles.algo.tokens import TokenSignal


def signal_of(advantages, old=None, behavior=None, sample_ids=None, mask=None, **fields) -> TokenSignal:
    count = len(advantages)
    mask = torch.tensor([True] * count if mask is None else mask)
    ids = torch.tensor([0] * count if sample_ids is None else sample_ids)
    lengths = torch.stack([((ids == i) & mask).sum() for i in ids])
    return TokenSignal(
        mask=mask,
        sample_ids=ids,
        lengths=lengths,
        num_samples=int(ids.max()) + 1,
        advantages=torch.tensor(advantages),
        behavior_logprobs=torch.tensor(behavior if behavior is not None else [0.0] * count),
        old_logprobs=None if old is None else torch.tensor(old),
        **fields,
    )


def run(name, logprobs, signal, **settings):
    x = torch.tensor(logprobs, requires_grad=True)
    out = getattr(losses, name)(x, signal, **settings)
    out.loss.sum().backward()
    return out, x.grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 1.0, -1.1, -1.1, False),
        (1.5, 1.0, -1.2, 0.0, True),
        (0.5, 1.0, -0.5, -0.5, False),
        (0.5, -1.0, 0.8, 0.0, True),
        (1.5, -1.0, 1.5, 1.5, False),
        (4.0, -1.0, 4.0, 4.0, False),
        (4.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_clipped_by_hand(ratio, advantage, loss, slope, clipped):
    out, grad = run("clipped", [math.log(ratio)], signal_of([advantage], old=[0.0]))
    assert out.loss.tolist() == pytest.approx([loss], abs=1e-5)
    assert grad == pytest.approx([slope], abs=1e-5)
    assert out.metrics["clipped"].tolist() == [clipped]
    assert out.metrics["ratio"].tolist() == pytest.approx([ratio])


def test_clip_ends_are_apart():
    out, _ = run("clipped", [math.log(1.25)] * 2, signal_of([1.0, 1.0], old=[0.0, 0.0]), clip_high=0.28)
    assert out.loss.tolist() == pytest.approx([-1.25] * 2)


def test_dual_clip_bounds_negative_advantages():
    signal = signal_of([-1.0, 1.0], old=[0.0, 0.0])
    out, grad = run("clipped", [math.log(4)] * 2, signal, dual_clip=3.0)
    assert out.loss.tolist() == pytest.approx([3.0, -1.2])
    assert out.metrics["dual_clipped"].tolist() == [True, False]
    assert grad == pytest.approx([0, 0], abs=1e-6)


def test_a_huge_log_ratio_stays_finite():
    for name in ("clipped", "cispo", "dppo", "reinforce", "gspo"):
        out, grad = run(name, [0.0], signal_of([-1.0], old=[-100.0], behavior=[-100.0]))
        assert torch.isfinite(out.loss).all()
        assert all(math.isfinite(g) for g in grad)


def test_gspo_ratio_is_the_geometric_mean_of_the_sequence_without_padding():
    signal = signal_of([1.0, 1.0, 0.0], old=[0.0] * 3, sample_ids=[0, 0, 0], mask=[True, True, False])
    out, grad = run("gspo", [0.1, 0.3, 5.0], signal, clip_low=10.0, clip_high=10.0)
    assert out.metrics["ratio"][:2].tolist() == pytest.approx([1.22140, 1.22140], abs=1e-5)
    # Under sequence_mean each of the two tokens weighs one half: d s / d logprob = s / 2.
    assert [-g / 2 for g in grad[:2]] == pytest.approx([0.61070, 0.61070], abs=1e-5)


def test_gspo_clips_whole_sequences():
    signal = signal_of([1.0, 1.0, 1.0], old=[0.0] * 3, sample_ids=[0, 0, 1])
    out, grad = run("gspo", [0.4, -0.2, 0.0001], signal)
    assert out.metrics["clipped"].tolist() == [True, True, False]
    assert grad[:2] == [0, 0]
    assert grad[2] == pytest.approx(-1.0001)


def test_gspo_refuses_half_a_sample():
    whole = signal_of([1.0, 1.0], old=[0.0, 0.0])
    half = TokenSignal(**{**vars(whole), "lengths": torch.tensor([3, 3])})
    with pytest.raises(ValueError, match="split over batches"):
        losses.gspo(torch.zeros(2), half)


def test_cispo_caps_the_weight_and_keeps_every_gradient():
    out, grad = run("cispo", [math.log(8), math.log(2)], signal_of([1.0, -1.0], old=[0.0, 0.0]))
    assert grad == pytest.approx([-5.0, 2.0])
    assert out.loss.tolist() == pytest.approx([-5 * math.log(8), 2 * math.log(2)])
    assert out.metrics["clipped"].tolist() == [True, False]


def test_reinforce_weighs_by_the_policy_that_sampled():
    out, grad = run("reinforce", [-1.0, -1.0], signal_of([1.0, 1.0], behavior=[-2.5, -1.0]))
    assert grad == pytest.approx([-2.0, -1.0])
    assert out.loss.tolist() == pytest.approx([2.0, 1.0])
    assert out.metrics["clipped"].tolist() == [True, False]


def test_dppo_masks_by_how_far_the_probability_moved():
    now = [0.5, 0.5, 0.5, 0.1, 0.1]
    before = [0.2, 0.35, 0.2, 0.35, 0.25]
    signal = signal_of([1.0, 1.0, -1.0, -1.0, -1.0], behavior=[math.log(p) for p in before])
    out, grad = run("dppo", [math.log(p) for p in now], signal)
    assert out.metrics["clipped"].tolist() == [True, False, False, True, False]
    assert grad == pytest.approx([0, -0.5 / 0.35, 2.5, 0, 0.4], abs=1e-5)


def test_dppo_caps_its_weight():
    _, grad = run("dppo", [math.log(0.1)], signal_of([1.0], behavior=[math.log(0.001)]), mask_threshold=0.2)
    assert grad == pytest.approx([-20.0])


def test_value_loss_is_half_the_larger_square():
    signal = signal_of([0.0], values=torch.tensor([0.0]), returns=torch.tensor([2.0]))
    out, grad = run("clipped_value", [1.0], signal)
    assert out.loss.tolist() == pytest.approx([1.62])
    assert out.metrics["value_clipped"].tolist() == [True]
    assert grad == [0.0]
    plain, grad = run("clipped_value", [1.0], signal, value_clip=None)
    assert plain.loss.tolist() == [0.5]
    assert grad == [-1.0]


def test_values_and_returns_of_two_shapes_are_refused():
    signal = signal_of([0.0, 0.0], values=torch.zeros(2), returns=torch.tensor([[1.0], [2.0]]))
    with pytest.raises(ValueError, match="broadcast into a square"):
        losses.clipped_value(torch.tensor([1.0, 2.0]), signal)


def test_losses_say_what_they_lack():
    with pytest.raises(ValueError, match="old_logprobs"):
        losses.clipped(torch.zeros(1), signal_of([1.0]))
    with pytest.raises(ValueError, match="values and returns"):
        losses.clipped_value(torch.zeros(1), signal_of([1.0]))
