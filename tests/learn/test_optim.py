from __future__ import annotations

import math

import pytest
import torch

from miles.config.schema import Learner
from miles.errors import CheckpointError, ConfigError
from miles.learn.optim import Optimizer, Schedule, gradient_norm


def parameters(*shapes):
    generator = torch.Generator().manual_seed(0)
    return {f"p{i}": torch.nn.Parameter(torch.randn(*shape, generator=generator)) for i, shape in enumerate(shapes)}


def optimizer(held, rate=0.1, **settings):
    return Optimizer(held, Learner(**settings), Schedule(rate))


def give(held, seed, factor=1.0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in held.values():
        parameter.grad = factor * torch.randn(parameter.shape, generator=generator)


def test_cosine_without_warm_up_starts_at_the_peak_and_ends_at_the_floor():
    schedule = Schedule(1.0, "cosine", floor=0.1, total=10)
    assert [schedule.at(u) for u in (0, 5, 10)] == pytest.approx([1.0, 0.55, 0.1])


def test_linear_decay_counts_updates_of_all_epochs_and_minibatches():
    """100 steps of 8 groups in minibatches of 2, 2 epochs: 800 updates, half way after 400."""
    schedule = Schedule(1.0, "linear", total=100 * 4 * 2)
    assert schedule.at(400) == pytest.approx(0.5)
    assert schedule.at(800) == 0.0


def test_warm_up_begins_above_zero_and_the_decay_begins_after_it():
    schedule = Schedule(2.0, "cosine", warmup=4, total=12)
    assert [schedule.at(u) for u in range(5)] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert schedule.at(8) == pytest.approx(1.0)
    assert schedule.at(100) == 0.0
    assert Schedule(1.0, warmup=2).at(10**6) == 1.0


def test_a_schedule_needs_the_length_of_the_run():
    with pytest.raises(ConfigError, match=r'learner\.schedule = "cosine" needs the number of updates'):
        Schedule.of(Learner(schedule="cosine"), 1.0, None)
    assert Schedule.of(Learner(schedule="linear", warmup_updates=3), 0.5, 10) == Schedule(0.5, "linear", 3, 0.0, 10)


def test_updates_are_those_of_plain_adamw_with_clipping():
    held, plain = parameters((5, 3), (7,)), parameters((5, 3), (7,))
    ours = optimizer(held, clip_norm=1.0, weight_decay=0.1, betas=(0.9, 0.99))
    theirs = torch.optim.AdamW(plain.values(), lr=0.1, weight_decay=0.1, betas=(0.9, 0.99), fused=False, foreach=False)
    for seed in range(5):
        give(held, seed, 10.0 if seed % 2 else 0.01)
        give(plain, seed, 10.0 if seed % 2 else 0.01)
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
        theirs.step()
        stepped = ours.step(seed, 0.0)
        assert stepped.norm == pytest.approx(norm.item(), rel=1e-6)
        assert not stepped.skipped
        assert all(parameter.grad is None for parameter in held.values())
    for name in held:
        torch.testing.assert_close(held[name], plain[name], atol=1e-6, rtol=1e-5)


def test_a_gradient_of_3_and_4_has_norm_5_and_is_clipped_to_the_bound():
    held = {"p": torch.nn.Parameter(torch.zeros(2))}
    ours = optimizer(held, rate=1.0, clip_norm=1.0, betas=(0.0, 0.0), eps=1.0)
    held["p"].grad = torch.tensor([3.0, 4.0])
    assert gradient_norm(held.values()) == 5.0
    assert ours.step(0, 0.0).norm == 5.0
    # Without momentum AdamW moves by g / (|g| + eps), which shows the clipped gradient [0.6, 0.8].
    torch.testing.assert_close(held["p"].detach(), -torch.tensor([0.6 / 1.6, 0.8 / 1.8]))
    held["p"].grad = torch.tensor([3.0, 4.0])
    unclipped = optimizer(held, clip_norm=None)
    assert unclipped.step(0, 0.0).norm == 5.0


def test_a_learning_rate_of_zero_changes_no_bit():
    held = parameters((4, 4))
    before = held["p0"].detach().clone()
    ours = optimizer(held, rate=0.0, weight_decay=0.5)
    for seed in range(3):
        give(held, seed)
        ours.step(seed, 1.0)
    assert torch.equal(held["p0"], before)


@pytest.mark.parametrize(("gradient", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, -math.inf)])
def test_what_is_not_finite_changes_neither_weights_nor_moments(gradient, loss):
    held = parameters((3, 3), (2,))
    ours = optimizer(held)
    give(held, 0)
    ours.step(0, 0.0)
    weights = {name: p.detach().clone() for name, p in held.items()}
    moments = {name: t.clone() for name, t in ours.state()[0].items()}
    give(held, 1)
    held["p1"].grad[0] = gradient
    stepped = ours.step(1, loss)
    assert stepped.skipped
    assert all(torch.equal(held[name], weights[name]) for name in held)
    assert all(torch.equal(t, moments[name]) for name, t in ours.state()[0].items())
    assert ours.state()[1] == {"applied": 1}
    assert held["p0"].grad is None


def test_no_gradient_is_a_gradient_of_zero():
    held, plain = parameters((3,)), parameters((3,))
    ours, theirs = optimizer(held), torch.optim.AdamW(plain.values(), lr=0.1, weight_decay=0.0, betas=(0.9, 0.95))
    give(held, 0)
    give(plain, 0, 1.0)
    torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
    ours.step(0, 0.0)
    theirs.step()
    plain["p0"].grad = torch.zeros(3)
    theirs.step()
    assert ours.step(1, 0.0).norm == 0.0
    torch.testing.assert_close(held["p0"], plain["p0"])


def test_a_resumed_optimizer_goes_on_to_the_bit():
    held = parameters((4, 3), (5,))
    ours = optimizer(held, weight_decay=0.01)
    assert ours.state() == ({}, {"applied": 0})
    for seed in range(3):
        give(held, seed)
        ours.step(seed, 0.0)
    tensors, state = ours.state()
    copied = {name: torch.nn.Parameter(p.detach().clone()) for name, p in held.items()}
    resumed = optimizer(copied, weight_decay=0.01)
    resumed.load_state({name: t.clone() for name, t in tensors.items()}, state)
    for seed in (3, 4):
        for parameters_, optimizer_ in ((held, ours), (copied, resumed)):
            give(parameters_, seed)
            optimizer_.step(seed, 0.0)
    assert all(torch.equal(held[name], copied[name]) for name in held)
    resumed.load_state({}, {"applied": 0})
    assert resumed.state() == ({}, {"applied": 0})


def test_a_foreign_checkpoint_is_refused_by_name():
    held = parameters((4, 3))
    with pytest.raises(CheckpointError, match=r"no tensor exp_avg\.p0"):
        optimizer(held).load_state({}, {"applied": 2})
    with pytest.raises(CheckpointError, match=r"exp_avg\.p0 has shape \(2,\), the model's \(4, 3\)"):
        optimizer(held).load_state({"exp_avg.p0": torch.zeros(2)}, {"applied": 2})
