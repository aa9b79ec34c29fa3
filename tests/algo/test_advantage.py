"""Advantages against hand-worked numbers, the recursion written out, and laws."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.algo import advantage
from miles.algo.advantage import StepScores


def slow_gae(rewards, values, mask, gamma, lam):
    """The recursion, right to left, carrying over untrained tokens."""
    out, next_value, a = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        if mask[t]:
            delta = rewards[t] + gamma * next_value - values[t]
            a = delta + gamma * lam * a
            next_value, out[t] = values[t], a
    return out


def test_broadcast_gives_every_token_of_a_sample_its_credit(table):
    out = advantage.broadcast(table([0, 0], lengths=[2, 3]), torch.tensor([0.5, -1.0]), StepScores())
    assert out.advantages.tolist() == [0.5, 0.5, -1, -1, -1]
    assert out.returns is None


def test_whitening_is_over_all_tokens_of_the_step():
    assert advantage.whiten(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-1, 1])
    whole = advantage.whiten(torch.tensor([1.0, 2.0, 10.0, 20.0]))
    assert whole.tolist() == pytest.approx([-0.9504, -0.8193, 0.2294, 1.5404], abs=1e-4)
    assert advantage.whiten(torch.tensor([5.0])).tolist() == [0.0]
    assert advantage.whiten(torch.tensor([])).tolist() == []


def test_broadcast_whitened_weighs_samples_by_their_tokens(table):
    step = table([0, 0], lengths=[1, 3])
    out = advantage.broadcast_whitened(step, torch.tensor([1.0, 0.0]), StepScores())
    std = math.sqrt(0.25 * 0.75)
    assert out.advantages.tolist() == pytest.approx([0.75 / std] + [-0.25 / std] * 3, abs=1e-5)


def test_kl_is_charged_on_trained_tokens_only_and_the_reward_stands_on_the_last(table):
    step = table([0.0], lengths=[3])
    scores = StepScores(torch.zeros(3), torch.full((3,), -0.1), beta=1.0)
    rewards = advantage.token_rewards(step, torch.tensor([0.0]), scores)
    assert rewards.tolist() == pytest.approx([-0.1, -0.1, -0.1])
    assert rewards.sum().item() == pytest.approx(-0.3)
    with_reward = advantage.token_rewards(step, torch.tensor([1.0]), scores)
    assert with_reward.tolist() == pytest.approx([-0.1, -0.1, 0.9])


def test_making_rewards_leaves_the_log_probabilities_alone(table):
    old, ref = torch.tensor([0.1, 0.2]), torch.zeros(2)
    advantage.token_rewards(table([1.0], lengths=[2]), torch.tensor([1.0]), StepScores(old, ref, beta=0.5))
    assert (old - ref).mean().item() == pytest.approx(0.15)


def test_a_kl_in_the_reward_has_no_gradient(table):
    old = torch.zeros(2, requires_grad=True)
    rewards = advantage.token_rewards(table([1.0], lengths=[2]), torch.ones(1), StepScores(old, old, beta=0.5))
    assert not rewards.requires_grad


def test_a_sample_without_trained_tokens_gets_no_reward_anywhere(table):
    step = table([1.0, 5.0, 2.0], lengths=[1, 0, 1])
    assert advantage.token_rewards(step, step.rewards, StepScores()).tolist() == [1.0, 2.0]


def test_a_kl_in_the_reward_asks_for_both_policies(table):
    with pytest.raises(ValueError, match="old_logprobs and ref_logprobs"):
        advantage.token_rewards(table([1.0]), torch.ones(1), StepScores(beta=0.1))


def test_gae_by_hand(table):
    # V = .5, .25; r = 0, 1. delta_1 = 1 - .25 = .75; delta_0 = .25 - .5 = -.25; A_0 = -.25 + .5 * .75 = .125
    step = table([1.0], lengths=[2])
    out = advantage.gae(step, torch.ones(1), StepScores(values=torch.tensor([0.5, 0.25])), gamma=1.0, lam=0.5)
    assert out.returns.tolist() == pytest.approx([0.625, 1.0])
    assert out.advantages.tolist() == pytest.approx([-1, 1], abs=1e-5)


def test_truncation_is_terminal(table):
    step = table([0.0], lengths=[1])
    out = advantage.gae(step, torch.zeros(1), StepScores(values=torch.tensor([0.9])))
    assert out.returns.tolist() == pytest.approx([0.0], abs=1e-6)


def test_gae_carries_over_gaps():
    rewards, values = torch.tensor([0.0, 9, 9, 1]), torch.tensor([0.5, 7, 7, 0.25])
    mask = torch.tensor([True, False, False, True])
    got = advantage.masked_gae(rewards, values, mask, gamma=1.0, lam=0.5)
    assert got.tolist() == pytest.approx([0.125, 0, 0, 0.75])
    plain = slow_gae(rewards.tolist(), values.tolist(), [True] * 4, 1.0, 0.5)
    assert plain[0] != pytest.approx(0.125), "the law is visible only because lambda < 1"


def test_gae_does_not_read_untrained_places():
    rewards = torch.tensor([0.0, float("nan"), 1.0])
    values = torch.tensor([0.5, float("inf"), 0.25])
    got = advantage.masked_gae(rewards, values, torch.tensor([True, False, True]), lam=0.9)
    assert torch.isfinite(got).all()
    assert advantage.masked_gae(rewards, values, torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


numbers = st.floats(-2, 2, width=32)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(numbers, numbers, st.booleans()), min_size=1, max_size=20),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
)
def test_gae_equals_the_recursion_written_out(rows, gamma, lam):
    rewards, values, mask = map(list, zip(*rows, strict=True))
    got = advantage.masked_gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), gamma, lam)
    assert got.tolist() == pytest.approx(slow_gae(rewards, values, mask, gamma, lam), abs=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.sampled_from([0.3, 0.95, 1.0]), st.integers(0, 99))
def test_samples_do_not_see_each_other(lengths, lam, seed):
    generator = torch.Generator().manual_seed(seed)
    step = _table([1.0] * len(lengths), lengths)
    values = torch.rand(sum(lengths), generator=generator)
    credit = torch.rand(len(lengths), generator=generator)
    out = advantage.gae(step, credit, StepScores(values=values), gamma=0.9, lam=lam)
    for i, (start, length) in enumerate(zip(step.starts.tolist(), lengths, strict=True)):
        v = values[start : start + length].tolist()
        r = [0.0] * (length - 1) + [credit[i].item()]
        expected = [a + b for a, b in zip(slow_gae(r, v, [True] * length, 0.9, lam), v, strict=True)]
        assert out.returns[start : start + length].tolist() == pytest.approx(expected, abs=1e-5)


def _table(rewards, lengths):
    from miles.types import StepTable

    sizes = torch.tensor(lengths)
    return StepTable(
        torch.repeat_interleave(torch.arange(len(lengths)), sizes),
        torch.zeros(int(sizes.sum())),
        sizes.cumsum(0) - sizes,
        sizes,
        torch.zeros(len(lengths), dtype=torch.int64),
        torch.tensor(rewards),
        torch.tensor(rewards),
        torch.tensor(rewards),
        torch.zeros(len(lengths), dtype=torch.bool),
    )


def test_token_returns_are_discounted_sums_then_whitened(table):
    step = table([1.0, 0.0], lengths=[3, 1])
    out = advantage.token_returns(step, step.rewards, StepScores(), gamma=0.5)
    expected = advantage.whiten(torch.tensor([0.25, 0.5, 1.0, 0.0]))
    assert out.advantages.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


def test_number_of_advantages_is_number_of_trained_tokens(table):
    out = advantage.token_returns(table([1.0], lengths=[3]), torch.ones(1), StepScores(), gamma=0.9)
    assert (out.advantages != 0).sum().item() == 3


def test_vapo_lambda_grows_with_length():
    lam = advantage.length_adaptive_lambda(torch.tensor([1, 20, 40, 1000, 0]), 0.05)
    assert lam.tolist() == pytest.approx([0, 0, 0.5, 0.98, 0])
    assert advantage.length_adaptive_lambda(torch.tensor([4]), 1.0).tolist() == [0.75]


def test_vapo_trains_the_critic_on_a_second_pass(table):
    step = table([1.0], lengths=[4])
    scores = StepScores(values=torch.tensor([0.1, 0.2, 0.3, 0.4]))
    out = advantage.length_adaptive_gae(step, torch.ones(1), scores, vapo_alpha=1.0)
    assert out.returns.tolist() == pytest.approx([1, 1, 1, 1])
    expected = slow_gae([0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4], [True] * 4, 1.0, 0.75)
    assert out.advantages.tolist() == pytest.approx(advantage.whiten(torch.tensor(expected)).tolist(), abs=1e-5)
    fixed = advantage.length_adaptive_gae(step, torch.ones(1), scores, lam=0.95)
    assert fixed.advantages.tolist() == pytest.approx(
        advantage.gae(step, torch.ones(1), scores, lam=0.95).advantages.tolist(), abs=1e-6
    )


def test_critic_rows_ask_for_values(table):
    with pytest.raises(ValueError, match="critic's values"):
        advantage.gae(table([1.0]), torch.ones(1), StepScores())


def test_monte_carlo_returns_hold_no_value(table):
    step = table([1.0], lengths=[3])
    scores = StepScores(torch.zeros(3), torch.zeros(3), values=torch.full((3,), 9.0), beta=0.1)
    assert advantage.monte_carlo_returns(step, torch.ones(1), scores, 0.5).tolist() == [0.25, 0.5, 1.0]


def test_an_empty_step_has_no_advantages(table):
    step = table([], lengths=[])
    for name in ("broadcast", "broadcast_whitened", "token_returns", "gae", "length_adaptive_gae"):
        out = getattr(advantage, name)(step, torch.zeros(0), StepScores(values=torch.zeros(0)))
        assert out.advantages.tolist() == []
