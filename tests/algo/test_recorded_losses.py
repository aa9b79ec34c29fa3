"""The losses of recorded answers: values worked by hand, one count over the update, and what recipes may not ask for."""

from __future__ import annotations

import math

import pytest
import torch

from miles.algo import DATA_ROWS, correction_mode, find, losses, problems
from miles.algo.build import Objective, gather, gather_tokens
from miles.algo.credit import pair_side
from miles.config.schema import Recipe

NAN = float("nan")


def recipe(name, **sections):
    algorithm = {"name": name, "steps": 1, **sections.pop("algorithm", {})}
    return Recipe.model_validate({"algorithm": algorithm, **sections})


def loss_of(objective, table, values, batches, spread_over):
    """Loss and gradient of one update over these batches, and the last batch's metrics."""
    signal = objective.signal(table)
    weights = objective.weights(table, torch.arange(len(table.lengths)))
    values = values.clone().requires_grad_()
    total = torch.zeros(())
    for batch in batches:
        output = objective.policy_loss(
            spread_over(values, batch), None, None, batch, gather(signal, batch), gather_tokens(weights, batch)
        )
        total = total + output.loss
    total.backward()
    return total.item(), values.grad, output.metrics


def test_likelihood_is_the_mean_over_trained_tokens_of_minus_log_pi(table, cut_into, spread_over):
    made = table([1.0, 1.0], group_ids=[0, 1], lengths=[1, 3])
    logprobs = torch.tensor([-1.0, -0.2, -0.4, -0.6])
    for parts in (1, 2):
        loss, grad, _ = loss_of(Objective.build(recipe("sft")), made, logprobs, cut_into(made, parts), spread_over)
        assert loss == pytest.approx(2.2 / 4)
        assert grad.tolist() == pytest.approx([-0.25] * 4)
    by_sequence = Objective.build(recipe("sft", algorithm={"reduction": "sequence_mean"}))
    loss, _, _ = loss_of(by_sequence, made, logprobs, cut_into(made, 2), spread_over)
    assert loss == pytest.approx((1.0 + 0.4) / 2)


def test_a_first_answer_token_is_trained(table, batch_of, spread_over):
    """p p r r e: the weights of the five places are 0 0 1 1 1 thirds, index t being about token t."""
    made = table([1.0], lengths=[3])
    objective = Objective.build(recipe("sft"))
    batch = batch_of(made, [-1, -1, 0, 1, 2])
    weights = gather_tokens(objective.weights(made, torch.tensor([0])), batch)
    assert weights.tolist() == pytest.approx([0, 0, 1 / 3, 1 / 3, 1 / 3])
    loss, grad, _ = loss_of(objective, made, torch.tensor([-1.0, -2.0, -3.0]), [batch], spread_over)
    assert loss == pytest.approx(2.0)
    assert not grad.isnan().any()


def pairs(table, scores, margins=None):
    count = len(scores) // 2
    made = table([1.0, 0.0] * count, group_ids=[i // 2 for i in range(2 * count)])
    if margins is not None:
        made = type(made)(**{**vars(made), "margins": torch.tensor(margins).repeat_interleave(2)})
    return made, torch.tensor(scores)


def test_bradley_terry_by_hand(table, batch_of, spread_over):
    """-log sigmoid(1) = 0.313262, its gradient -sigmoid(-1) = -0.268941; what stands off the mask is not read."""
    objective = Objective.build(recipe("reward_model"))
    made, scores = pairs(table, [1.0, 0.0])
    loss, grad, metrics = loss_of(objective, made, scores, [batch_of(made, [-1, 0, -1, 1])], spread_over)
    assert loss == pytest.approx(0.313262, abs=1e-6)
    assert grad.tolist() == pytest.approx([-0.268941, 0.268941], abs=1e-6)
    assert metrics["pair_gap"].tolist() == [0, 1, 0, 1]
    assert metrics["pair_right"].tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("scores", "margins", "centre", "expected"),
    [
        ([0.0, 0.0], None, 0.0, math.log(2)),
        ([0.0, 1.0], None, 0.0, 1.313262),
        ([1.0, 0.0], [0.5], 0.0, 0.474077),  # log(1 + exp(0.5 - 1))
        ([1.0, 0.5], None, 0.01, 0.474077 + 0.01 * 1.5**2),
        ([1.0, 0.0, 0.0, 1.0], None, 0.0, (0.313262 + 1.313262) / 2),
        ([200.0, 0.0], None, 0.0, 0.0),
        ([0.0, 200.0], None, 0.0, 200.0),
    ],
)
def test_margin_centre_and_mean_over_pairs(table, batch_of, spread_over, scores, margins, centre, expected):
    objective = Objective.build(recipe("reward_model", algorithm={"centre_coef": centre}))
    made, values = pairs(table, scores, margins)
    whole = [batch_of(made, range(len(scores)))]
    apart = [batch_of(made, [i, i + 1]) for i in range(0, len(scores), 2)]
    for batches in (whole, apart):
        loss, grad, _ = loss_of(objective, made, values, batches, spread_over)
        assert loss == pytest.approx(expected, abs=1e-5)
        assert torch.isfinite(grad).all()


def test_equal_scores_are_half_right_and_a_split_pair_is_refused(table, batch_of, spread_over):
    objective = Objective.build(recipe("reward_model"))
    made, scores = pairs(table, [0.3, 0.3])
    _, _, metrics = loss_of(objective, made, scores, [batch_of(made, [0, 1])], spread_over)
    assert metrics["pair_right"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match="a pair is split over batches"):
        loss_of(objective, made, scores, [batch_of(made, [0]), batch_of(made, [1])], spread_over)


def test_a_batch_without_trained_places_adds_nothing(table, batch_of, spread_over):
    made, values = pairs(table, [1.0, 0.0])
    for name in DATA_ROWS:
        objective = Objective.build(recipe(name))
        whole, empty = batch_of(made, [0, 1]), batch_of(made, [-1, -1])
        expected = loss_of(objective, made, values, [whole], spread_over)[0]
        assert loss_of(objective, made, values, [empty, whole], spread_over)[0] == expected
        assert loss_of(objective, made, values, [empty], spread_over)[0] == 0.0


def test_pair_side_says_which_answer_is_better():
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    assert pair_side(rewards, groups, groups, rewards).tolist() == [1, -1, -1, 1]


def test_recorded_answers_have_no_behavior_policy():
    for name, row in DATA_ROWS.items():
        updates = recipe(name, learner={"epochs": 2, "minibatches": 2})
        objective = Objective.build(updates)
        assert correction_mode(row, updates) == "none"
        assert [objective.needs_old, objective.needs_ref, objective.needs_critic] == [False] * 3
        assert find(name) is row
        assert problems(row, updates) == []


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature = 0.7 has no meaning with"),
        ({"reward": {"functions": ("exact_number",)}}, "reward.functions"),
        ({"reward": {"model": "somewhere"}}, "reward.model"),
        ({"buffer": {"max_staleness": 1}}, "buffer.max_staleness"),
        ({"engine": {"kind": "vllm"}}, "engine.kind = vllm"),
        ({"run": {"stop_at_reward": 0.5}}, "run.stop_at_reward"),
        ({"algorithm": {"beta": 0.1}}, "algorithm.beta = 0.1"),
        ({"algorithm": {"entropy_coef": 0.1}}, "algorithm.entropy_coef"),
        ({"algorithm": {"clip_low": 0.1}}, "algorithm.clip_low = 0.1 has no effect"),
        ({"algorithm": {"reduction": "constant"}}, "use token_mean or sequence_mean"),
    ],
)
def test_what_only_sampled_answers_have_is_refused(sections, words):
    for name, row in DATA_ROWS.items():
        found = problems(row, recipe(name, **sections))
        assert len(found) == 1
        assert words in found[0]


def test_the_centring_term_is_the_reward_models_alone():
    found = problems(DATA_ROWS["sft"], recipe("sft", algorithm={"centre_coef": 0.1}))
    assert "algorithm.centre_coef = 0.1 has no effect with sft" in found[0]


def test_a_pair_without_groups_is_said():
    with pytest.raises(ValueError, match="group_ids"):
        losses.bradley_terry(torch.zeros(0), losses.TokenSignal(*[torch.zeros(0)] * 3, 0, *[torch.zeros(0)] * 2))
