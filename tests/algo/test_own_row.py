"""A user's own row, from a file outside the package: found, bound, trained with and held to the same laws."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from miles.algo import ROWS, AlgorithmRow, find, problems
from miles.algo.build import Objective, gather
from miles.algo.losses import TokenLoss
from miles.algo.metrics import Totals
from miles.algo.rehearsal import rehearse
from miles.config.schema import Recipe
from miles.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_algorithm.py"


def recipe(name="mine", **algorithm) -> Recipe:
    return Recipe.model_validate({"algorithm": {"name": name, **algorithm}})


def loss_of(objective, step, batches, spread):
    signal = objective.signal(step.table, step.old_logprobs)
    weights = objective.weights(step.table, torch.arange(len(step.table.lengths)))
    logprobs = step.logprobs.clone().requires_grad_()
    total, totals = 0.0, Totals()
    for batch in batches:
        out = objective.policy_loss(
            spread(logprobs, batch), None, None, batch, gather(signal, batch), spread(weights, batch)
        )
        out.loss.backward()
        total, totals = total + out.loss.item(), totals + Totals.of(out.metrics, batch.loss_mask)
    return total, logprobs.grad, totals.row(), signal


def test_the_example_trains_its_own_loss(step, cut_into, spread_over):
    name = f"{EXAMPLE}:SOFT_CLIP"
    row = find(name)
    assert problems(row, recipe(name)) == []
    objective = Objective.build(recipe(name))
    loss, grad, metrics, signal = loss_of(objective, step, cut_into(step.table, 1), spread_over)
    expected, lengths = 0.0, step.table.lengths.tolist()
    for now, old, a, owner in zip(
        step.logprobs.tolist(),
        step.old_logprobs.tolist(),
        signal.advantages.tolist(),
        step.table.sample_ids.tolist(),
        strict=True,
    ):
        tau = 1.0 if a > 0 else 1.05
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(now - old) - 1)))
        expected -= a * gate / (lengths[owner] * len(lengths))
    assert loss == pytest.approx(expected, rel=1e-5)
    assert metrics["algorithm/gate"] > 0
    for parts in (2, 5):
        other, other_grad, other_row, _ = loss_of(objective, step, cut_into(step.table, parts), spread_over)
        assert other == pytest.approx(loss, rel=1e-5)
        assert torch.allclose(other_grad, grad, atol=1e-7)
        assert other_row == pytest.approx(metrics, rel=1e-5)


def test_on_policy_the_example_is_the_plain_policy_gradient():
    row = find(f"{EXAMPLE}:SOFT_CLIP")
    from miles.algo.tokens import TokenSignal

    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    signal = TokenSignal(
        mask=torch.tensor([True, True]),
        sample_ids=torch.tensor([0, 1]),
        lengths=torch.tensor([1, 1]),
        num_samples=2,
        advantages=torch.tensor([1.5, -0.5]),
        behavior_logprobs=torch.tensor([-1.0, -2.0]),
        old_logprobs=torch.tensor([-1.0, -2.0]),
    )
    row.policy_loss(logprobs, signal).loss.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([-1.5, 0.5])


def test_every_kind_of_function_may_be_the_users_own(step, cut_into, spread_over):
    def credit(rewards, group_ids, lengths, baseline_rewards, *, gamma, bonus=0.25):
        return rewards * gamma + bonus

    def advantage(table, credit, scores):
        return credit[table.sample_ids]

    def loss(logprobs, signal, *, clip_low=9.0):
        return -signal.advantages * logprobs * clip_low

    def value(values, signal):
        return values - signal.values

    row = AlgorithmRow("mine", credit, advantage, loss, source="", value_loss=value, defaults={"clip_low": 2.0})
    objective = Objective.build(recipe(gamma=0.5), row)
    signal = objective.signal(step.table, values=step.values)
    assert torch.allclose(signal.credit, step.table.rewards * 0.5 + 0.25)
    batch = cut_into(step.table, 1)[0]
    weights = spread_over(objective.weights(step.table, torch.arange(9)), batch)
    gathered = gather(signal, batch)
    out = objective.policy_loss(spread_over(step.logprobs, batch), None, None, batch, gathered, weights)
    assert out.loss.item() == pytest.approx((-signal.advantages * step.logprobs * 2.0).mean().item(), rel=1e-5)
    critic = objective.value_loss(spread_over(step.values_now, batch), gathered, weights)
    assert critic.loss.item() == pytest.approx((step.values_now - step.values).mean().item(), rel=1e-4)


def test_a_recipe_overrides_the_rows_defaults(step):
    row = AlgorithmRow(
        "mine", "group_standardized", "broadcast", "clipped", source="", defaults={"clip_low": 0.1, "scale_std": True}
    )
    objective = Objective.build(recipe(clip_low=0.3, scale_std=False), row)
    assert objective.settings["clip_low"] == 0.3
    centred = Objective.build(recipe(), AlgorithmRow("c", "group_centred", "broadcast", "clipped", source=""))
    assert torch.equal(objective.signal(step.table).credit, centred.signal(step.table).credit)


def test_a_parameter_that_nothing_fills_is_refused():
    row = AlgorithmRow("mine", "reward", "broadcast", lambda logprobs, signal, *, tau: logprobs, source="")
    with pytest.raises(ConfigError, match=r"the parameter tau of its policy_loss has neither a default nor a value"):
        Objective.build(recipe(), row)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"credit": "group_center"}, "its credit 'group_center' is no function of miles.algo.credit; the nearest is"),
        ({"advantage": "StepScores"}, "its advantage 'StepScores' is no function"),
        ({"policy_loss": "_old"}, "its policy_loss '_old' is no function"),
        ({"policy_loss": "select"}, "its policy_loss 'select' is no function"),
    ],
)
def test_a_function_name_that_does_not_exist_is_refused(fields, words):
    row = AlgorithmRow(
        **{
            "name": "mine",
            "credit": "reward",
            "advantage": "broadcast",
            "policy_loss": "clipped",
            "source": "",
            **fields,
        }
    )
    with pytest.raises(ConfigError) as caught:
        Objective.build(recipe(), row)
    assert words in str(caught.value)


# --- what a user's function may get wrong --------------------------------------------------------------------------------


def own(**fields) -> AlgorithmRow:
    return AlgorithmRow(**{"name": "mine", "credit": "reward", "advantage": "broadcast", "policy_loss": "clipped", "source": "", **fields})  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"credit": 5}, "its credit is 5, which cannot be called: give a function of (rewards, group_ids, lengths"),
        ({"credit": lambda rewards: rewards}, "cannot be called with (rewards, group_ids, lengths, baseline_rewards)"),
        ({"advantage": lambda table, credit: credit}, "its advantage <lambda>(table, credit) cannot be called with"),
        ({"policy_loss": lambda a, b, c: a}, "missing a required argument: 'c'"),
        (
            {"value_loss": lambda values: values},
            "its value_loss <lambda>(values) cannot be called with (values, signal)",
        ),
        ({"policy_loss": lambda a, b, *, tau: a}, "the parameter tau of its policy_loss has neither a default"),
    ],
)
def test_a_signature_that_does_not_fit_is_a_problem_of_the_recipe(fields, words):
    (problem,) = problems(own(**fields), recipe())
    assert problem.startswith("algorithm.name = mine: ")
    assert words in problem
    with pytest.raises(ConfigError, match=r"algorithm\.name = mine: "):
        Objective.build(recipe(), own(**fields))


def raises(logprobs, signal):
    raise KeyError("x")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"credit": lambda r, g, n, b: r[:1]}, "one number a sample, a float tensor of shape [16]; it returned shape [1]"),
        ({"credit": lambda r, g, n, b: r.tolist()}, "it returned [0.0, 1.0,"),
        ({"advantage": lambda t, c, s: c}, "one advantage a trained token, a float tensor of shape [31]; it returned shape [16]"),
        ({"advantage": lambda t, c, s: None}, "it returned None"),
        ({"policy_loss": lambda p, s: -p.mean()}, "one loss a token, not their mean or sum, a float tensor of shape [32]"),
        ({"policy_loss": lambda p, s: p.detach()}, "returned a loss without a gradient"),
        ({"policy_loss": lambda p, s: p.long()}, "it returned torch.int64 of shape [32]"),
        ({"policy_loss": lambda p, s: TokenLoss(p, {"x": 1.0})}, "must give the metric 'x' as a tensor with one number a token, got 1.0"),
        ({"policy_loss": lambda p, s: TokenLoss(p, [p])}, "must give its metrics as a mapping of name to tensor"),
        ({"policy_loss": raises}, "its policy_loss raises raised KeyError: 'x' ("),
        ({"advantage": "gae"}, "its parts do not fit together: this advantage needs the critic's values"),
        ({"advantage": "gae", "value_loss": lambda v, s: v.mean()}, "its value_loss <lambda> must return one loss a token"),
    ],
)  # fmt: skip
def test_a_rehearsal_says_what_a_function_does_wrong(fields, words):
    with pytest.raises(ConfigError) as caught:
        rehearse(recipe(), own(**fields))
    assert str(caught.value).startswith("algorithm.name = mine: its ")
    assert words in str(caught.value)


@pytest.mark.parametrize("name", [*ROWS, f"{EXAMPLE}:SOFT_CLIP"])
def test_a_row_that_works_passes_its_rehearsal(name):
    row = find(name)
    assert rehearse(recipe(name), dataclasses.replace(row)) is None


def test_a_function_is_held_to_its_contract_in_every_step(step):
    row = own(credit=lambda r, g, n, b: r if len(r) == 16 else r[1:])
    rehearse(recipe(), row)
    with pytest.raises(ConfigError, match=r"its credit <lambda> must return one number a sample, .* shape \[9\]"):
        Objective.build(recipe(), row).signal(step.table)
