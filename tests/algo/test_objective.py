"""The objective of a step: the laws that hold for every row, and what the learner has to score for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from miles.algo import ROWS, AlgorithmRow
from miles.algo.build import Objective, gather, gather_tokens
from miles.algo.metrics import Totals
from miles.config.schema import Recipe

NAN = float("nan")


def recipe(name, updates=None, **algorithm) -> Recipe:
    row = ROWS[name]
    updates = (1 if row.one_update else 2) if updates is None else updates
    return Recipe.model_validate(
        {
            "algorithm": {"name": name, **row.defaults, **algorithm},
            "learner": {"epochs": updates},
            "rollout": {"max_new_tokens": 8},
        }
    )


def signal_of(objective, step):
    return objective.signal(
        step.table,
        old_logprobs=step.old_logprobs if objective.needs_old else None,
        ref_logprobs=step.ref_logprobs if objective.needs_ref else None,
        values=step.values if objective.needs_critic else None,
    )


def run(objective, step, batches, spread, update=None, filler=NAN):
    """Loss, gradient [N] and metric totals of one update, over any batches."""
    signal = signal_of(objective, step)
    update = torch.arange(len(step.table.lengths)) if update is None else update
    weights = objective.weights(step.table, update)
    nll = objective.nll_weights(step.table, update) if objective.needs_nll else None
    logprobs = step.logprobs.clone().requires_grad_()
    entropy = (step.logprobs**2).detach() if objective.needs_entropy else None
    loss, totals = torch.zeros(()), Totals()
    for batch in batches:
        out = objective.policy_loss(
            spread(logprobs, batch, filler),
            None if entropy is None else spread(entropy, batch, filler),
            spread(step.ref_logprobs, batch, filler) if objective.needs_ref else None,
            batch,
            gather(signal, batch),
            spread(weights, batch, filler),
            nll_weights=None if nll is None else spread(nll, batch, filler),
        )
        out.loss.backward()
        loss, totals = loss + out.loss.detach(), totals + Totals.of(out.metrics, batch.loss_mask)
    return loss.item(), logprobs.grad, totals.row()


VARIANTS = [
    *((name, {}) for name in ROWS),
    ("grpo", {"beta": 0.1, "entropy_coef": 0.01}),
    ("ppo", {"kl_place": "loss", "beta": 0.1}),
    ("dapo", {"correction": {"kind": "mask"}, "dual_clip": 3.0}),
    ("rloo", {"correction": {"kind": "sequence_mask_product"}, "reduction": "constant"}),
    ("cispo", {"beta": 0.1, "kl_estimator": "k3_weighted", "correction": {"mode": "bypass"}}),
]
IDS = [f"{name}-{'-'.join(extra)}" if extra else name for name, extra in VARIANTS]


@pytest.mark.parametrize(("name", "extra"), VARIANTS, ids=IDS)
def test_loss_gradient_and_metrics_do_not_depend_on_the_cut(name, extra, step, cut_into, spread_over):
    objective = Objective.build(recipe(name, **extra))
    loss, grad, row = run(objective, step, cut_into(step.table, 1, gap=0), spread_over)
    for parts, gap, seed in ((2, 1, 1), (4, 3, 2), (9, 5, 3)):
        other, other_grad, other_row = run(objective, step, cut_into(step.table, parts, gap, seed), spread_over)
        assert other == pytest.approx(loss, rel=1e-5, abs=1e-6)
        assert torch.allclose(other_grad, grad, rtol=1e-5, atol=1e-7)
        assert other_row == pytest.approx(row, rel=1e-5, abs=1e-6)
    assert grad.abs().max() > 0


@pytest.mark.parametrize("filler", [NAN, float("inf"), -float("inf"), 1e30])
@pytest.mark.parametrize("name", list(ROWS))
def test_nothing_off_the_mask_is_read(name, filler, step, cut_into, spread_over):
    objective = Objective.build(recipe(name))
    batches = cut_into(step.table, 2)
    loss, grad, row = run(objective, step, batches, spread_over, filler=0.0)
    assert run(objective, step, batches, spread_over, filler=filler)[0] == loss
    assert torch.equal(run(objective, step, batches, spread_over, filler=filler)[1], grad)
    assert run(objective, step, batches, spread_over, filler=filler)[2] == row


@pytest.mark.parametrize("name", list(ROWS))
def test_a_batch_without_trained_tokens_gives_zero_and_a_zero_gradient(name, step, batch_of):
    objective = Objective.build(recipe(name))
    batch = batch_of(step.table, [-1, -1, -1])
    logprobs = torch.full((3,), NAN, requires_grad=True)
    zeros = torch.zeros(3)
    out = objective.policy_loss(
        logprobs, None, zeros, batch, gather(signal_of(objective, step), batch), zeros, nll_weights=zeros
    )
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert logprobs.grad.tolist() == [0, 0, 0]
    assert Totals.of(out.metrics, batch.loss_mask).row() == {}


@pytest.mark.parametrize("name", list(ROWS))
def test_an_empty_table_is_a_step_of_zero(name, table, batch_of):
    objective = Objective.build(recipe(name))
    empty = table([], lengths=[])
    none = torch.zeros(0)
    signal = objective.signal(empty, none, none, none)
    batch = batch_of(empty, [-1, -1])
    gathered = gather(signal, batch)
    weights = gather_tokens(objective.weights(empty, torch.zeros(0, dtype=torch.int64)), batch)
    logprobs = torch.zeros(2, requires_grad=True)
    out = objective.policy_loss(logprobs, None, torch.zeros(2), batch, gathered, weights, nll_weights=weights)
    out.loss.backward()
    assert out.loss.item() == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", list(ROWS))
def test_updates_of_a_step_add_up_to_the_samples_they_hold(name, step, cut_into, spread_over):
    """Each update divides by its own count; tokens of other updates weigh nothing."""
    objective = Objective.build(recipe(name))
    update = torch.tensor([3, 4, 5])
    loss, grad, _ = run(objective, step, cut_into(step.table, 3), spread_over, update=update)
    inside = torch.isin(step.table.sample_ids, update)
    assert grad[~inside].abs().max() == 0
    assert grad[inside].abs().max() > 0
    alone = run(objective, step, cut_into(step.table, 1), spread_over, update=update)
    assert alone[0] == pytest.approx(loss, rel=1e-5, abs=1e-6)


def test_no_row_is_an_alias_of_another(step, cut_into, spread_over):
    """On one off-policy batch every two rows differ in loss and in gradient; with the same credit, by more than a factor."""
    results = {
        name: run(Objective.build(recipe(name)), step, cut_into(step.table, 1), spread_over)[:2] for name in ROWS
    }
    names = list(ROWS)
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            (loss_a, grad_a), (loss_b, grad_b) = results[a], results[b]
            assert abs(loss_a - loss_b) > 1e-4, (a, b)
            assert (grad_a - grad_b).abs().max() > 1e-3, (a, b)
            if ROWS[a].credit == ROWS[b].credit:
                cosine = torch.nn.functional.cosine_similarity(grad_a, grad_b, dim=0).item()
                assert cosine < 0.999, (a, b, cosine)


@pytest.mark.parametrize(
    ("name", "updates", "extra", "mode", "needs_old"),
    [
        ("grpo", 1, {}, "none", False),
        ("grpo", 2, {}, "decoupled", True),
        ("grpo", 1, {"correction": {"mode": "decoupled"}}, "decoupled", False),
        ("grpo", 1, {"correction": {"mode": "decoupled", "kind": "sequence_truncate"}}, "decoupled", True),
        ("grpo", 2, {"correction": {"mode": "bypass"}}, "bypass", False),
        ("dppo", 2, {}, "bypass", False),
        ("reinforce", 1, {}, "bypass", False),
        ("opo", 1, {}, "bypass", False),
        ("remax", 1, {}, "bypass", False),
        ("ppo", 1, {}, "none", True),
        ("ppo", 1, {"beta": 0.0}, "none", False),
        ("ppo", 1, {"kl_place": "loss"}, "none", False),
    ],
)
def test_what_must_be_scored(name, updates, extra, mode, needs_old):
    objective = Objective.build(recipe(name, updates, **extra))
    assert (objective.correction_mode, objective.needs_old) == (mode, needs_old)


def test_reference_and_critic_are_asked_for_where_used():
    assert not Objective.build(recipe("grpo")).needs_ref
    assert Objective.build(recipe("grpo", beta=0.1)).needs_ref
    assert [name for name in ROWS if Objective.build(recipe(name)).needs_critic] == ["ppo", "vapo"]
    assert [name for name in ROWS if Objective.build(recipe(name)).needs_ref] == ["reinforce_pp", "ppo"]


def test_with_one_update_the_own_forward_is_old_and_the_ratio_is_one(step, cut_into, spread_over):
    objective = Objective.build(recipe("grpo", 1))
    signal = objective.signal(step.table)
    assert signal.old_logprobs is None
    assert signal.correction_weights is None
    row = run(objective, step, cut_into(step.table, 2), spread_over)[2]
    assert (row["ratio/mean"], row["ratio/max"], row["ratio/clip_fraction"], row["kl/old"]) == (1, 1, 0, 0)
    assert row["kl/behavior"] > 0
    assert "correction/ess" not in row
    assert "kl/ref" not in row


def test_agreement_with_the_engine_is_a_gap_of_zero(step, cut_into, spread_over):
    same = replace(step, logprobs=step.table.behavior_logprobs)
    row = run(Objective.build(recipe("grpo", 1)), same, cut_into(step.table, 2), spread_over)[2]
    assert row["kl/behavior"] == 0.0


def test_the_own_forward_also_corrects_for_the_engine(step, cut_into, spread_over):
    one = Objective.build(recipe("grpo", 1, correction={"mode": "decoupled"}))
    _, grad, row = run(one, step, cut_into(step.table, 2), spread_over)
    plain = run(Objective.build(recipe("grpo", 1)), step, cut_into(step.table, 2), spread_over)[1]
    weight = (step.logprobs - step.table.behavior_logprobs).exp().clamp(max=2.0)
    assert torch.allclose(grad, plain * weight, rtol=1e-4, atol=1e-6)
    assert row["correction/weight_max"] > 2.0
    assert 0 < row["correction/ess"] < 1
    assert row["correction/masked_fraction"] == 0.0


def test_a_mask_zeroes_tokens_but_keeps_them_in_the_count(step, cut_into, spread_over):
    masked = Objective.build(recipe("dapo", correction={"kind": "mask"}))
    loose = Objective.build(recipe("dapo", correction={"kind": "mask", "low": 1e-6, "high": 1e6}))
    _, grad, row = run(masked, step, cut_into(step.table, 1), spread_over)
    _, whole, _ = run(loose, step, cut_into(step.table, 1), spread_over)
    weight = (step.old_logprobs - step.table.behavior_logprobs).exp()
    kept = (weight >= 0.5) & (weight <= 5)
    assert torch.allclose(grad, torch.where(kept, whole, 0.0))
    assert row["correction/masked_fraction"] == pytest.approx((~kept).float().mean().item())
    assert 0 < row["correction/masked_fraction"] < 1


def test_bypass_takes_the_ratio_to_the_policy_that_sampled(step, cut_into, spread_over):
    objective = Objective.build(recipe("dapo", correction={"mode": "bypass"}))
    signal = signal_of(objective, step)
    assert torch.equal(signal.old_logprobs, step.table.behavior_logprobs)
    assert signal.correction_weights is None
    row = run(objective, step, cut_into(step.table, 1), spread_over)[2]
    ratio = (step.logprobs - step.table.behavior_logprobs).exp()
    assert row["ratio/max"] == pytest.approx(ratio.max().item())


def test_kl_metrics_are_not_clamped(table, batch_of):
    objective = Objective.build(recipe("grpo", beta=0.1))
    step = table([1.0, 0.0])
    ref = torch.tensor([99.0, -1.0])
    signal = objective.signal(step, torch.tensor([-1.0, -1.0]), ref)
    batch = batch_of(step, [0, 1])
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    out = objective.policy_loss(logprobs, None, None, batch, gather(signal, batch), torch.ones(2))
    out.loss.backward()
    assert out.metrics["kl_ref"].tolist() == [-100.0, 0.0]
    assert torch.isfinite(out.loss)
    assert torch.isfinite(logprobs.grad).all()


def test_a_kl_in_the_loss_moves_the_policy_where_advantages_are_zero(table, batch_of):
    objective = Objective.build(recipe("grpo", 1, beta=100.0, kl_estimator="k2"))
    step = table([1.0, 1.0])
    signal = objective.signal(step, ref_logprobs=torch.tensor([-2.0, -2.0]))
    batch = batch_of(step, [0, 1])
    logprobs = torch.tensor([-1.0, -2.0], requires_grad=True)
    weights = objective.weights(step, torch.tensor([0, 1]))
    objective.policy_loss(logprobs, None, None, batch, gather(signal, batch), weights).loss.backward()
    assert logprobs.grad.tolist() == [50.0, 0.0]


def test_kl_in_the_loss_follows_a_given_beta(table, batch_of):
    objective = Objective.build(recipe("grpo", 1, beta=0.1, kl_estimator="k2"))
    step = table([1.0, 1.0])
    signal = objective.signal(step, ref_logprobs=torch.tensor([-2.0, -2.0]))
    batch = batch_of(step, [0, 1])
    losses = [
        objective.policy_loss(
            torch.tensor([-1.0, -1.0]), None, None, batch, gather(signal, batch), torch.full((2,), 0.5), beta=beta
        ).loss.item()
        for beta in (0.1, 0.4)
    ]
    assert losses == pytest.approx([0.05, 0.2])


def test_kl_in_the_reward_follows_a_given_beta(step):
    objective = Objective.build(recipe("ppo", lam=1.0))
    zeros = torch.zeros_like(step.values)
    returns = [
        objective.signal(step.table, zeros, zeros - 1, zeros, beta=beta).returns[0].item() for beta in (0.0, 0.5)
    ]
    assert returns == pytest.approx([1.0, 0.5])


def test_entropy_is_a_bonus(table, batch_of):
    objective = Objective.build(recipe("grpo", 1, entropy_coef=0.5))
    step = table([1.0, 1.0])
    batch = batch_of(step, [0, 1])
    gathered = gather(objective.signal(step), batch)
    entropy = torch.tensor([1.0, 3.0], requires_grad=True)
    logprobs = torch.tensor([-1.0, -1.0])
    out = objective.policy_loss(logprobs, entropy, None, batch, gathered, torch.full((2,), 0.5))
    out.loss.backward()
    assert out.loss.item() == pytest.approx(-1.0)
    assert entropy.grad.tolist() == [-0.25, -0.25]
    assert out.metrics["loss_policy"].sum().item() == 0.0
    assert out.metrics["loss_total"].sum().item() == pytest.approx(-1.0)


def test_likelihood_of_correct_samples_divides_by_their_tokens(table, batch_of):
    objective = Objective.build(recipe("vapo", 1))
    step = table([1.0, 0.0, 1.0], [0, 1, 2], lengths=[1, 2, 3])
    update = torch.tensor([0, 1, 2])
    nll = objective.nll_weights(step, update)
    assert nll.tolist() == [0.25, 0, 0, 0.25, 0.25, 0.25]
    assert objective.nll_weights(step, torch.tensor([1])).tolist() == [0.0] * 6
    batch = batch_of(step, range(6))
    gathered = gather(objective.signal(step, values=torch.zeros(6)), batch)
    out = objective.policy_loss(
        torch.full((6,), -2.0), None, None, batch, gathered, objective.weights(step, update), nll_weights=nll
    )
    assert out.metrics["loss_nll"].sum().item() == pytest.approx(0.2)
    assert out.loss.item() == pytest.approx(out.metrics["loss_policy"].sum().item() + 0.2, abs=1e-6)


def test_value_loss_does_not_depend_on_the_cut_and_is_a_mean_over_tokens(step, cut_into, spread_over):
    objective = Objective.build(recipe("ppo"))
    signal = signal_of(objective, step)
    weights = objective.value_weights(step.table, torch.arange(9))
    results = []
    for parts in (1, 3, 9):
        values, loss, totals = step.values_now.clone().requires_grad_(), 0.0, Totals()
        for batch in cut_into(step.table, parts):
            out = objective.value_loss(spread_over(values, batch), gather(signal, batch), spread_over(weights, batch))
            out.loss.backward()
            loss, totals = loss + out.loss.item(), totals + Totals.of(out.metrics, batch.loss_mask)
        results.append((loss, values.grad, totals.row()))
    v, old, target = step.values_now, step.values, signal.returns
    bounded = old + (v - old).clamp(-0.2, 0.2)
    expected = 0.5 * torch.maximum((v - target) ** 2, (bounded - target) ** 2).mean().item()
    for loss, grad, row in results:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert torch.allclose(grad, results[0][1], atol=1e-7)
        assert row["loss/value"] == pytest.approx(expected, rel=1e-5)
        assert row["value/mean"] == pytest.approx(v.mean().item(), rel=1e-5)
        assert 0 < row["value/clip_fraction"] < 1


def test_an_unclipped_value_stays_unclipped(step, cut_into, spread_over):
    objective = Objective.build(recipe("ppo", value_clip=None))
    batch = cut_into(step.table, 1)[0]
    signal = signal_of(objective, step)
    weights = spread_over(objective.value_weights(step.table, torch.arange(9)), batch)
    out = objective.value_loss(spread_over(step.values_now, batch), gather(signal, batch), weights)
    assert out.loss.item() == pytest.approx(0.5 * ((step.values_now - signal.returns) ** 2).mean().item(), rel=1e-5)


def test_values_with_a_trailing_axis_are_refused(step, cut_into):
    objective = Objective.build(recipe("ppo"))
    batch = cut_into(step.table, 1, gap=0)[0]
    values = torch.zeros(len(batch.slots), 1)
    with pytest.raises(ValueError, match="values have shape"):
        objective.value_loss(values, gather(signal_of(objective, step), batch), torch.ones(len(batch.slots)))
    with pytest.raises(ValueError, match="grpo has no critic"):
        Objective.build(recipe("grpo")).value_loss(values, gather(signal_of(objective, step), batch), values)


def test_rows_that_may_be_skipped_have_no_advantage(table):
    objective = Objective.build(recipe("grpo"))
    step = table([1, 1, 1, 0], [0, 0, 1, 1], lengths=[2, 1, 1, 3])
    signal = objective.signal(step, torch.zeros(7))
    assert objective.rows_with_gradient(signal).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("name", "extra"),
    [("grpo", {"beta": 0.1}), ("grpo", {"entropy_coef": 0.1}), ("grpo", {"nll_coef": 0.1}), ("ppo", {"beta": 0.0})],
)
def test_no_row_is_skipped_where_something_else_reaches_it(name, extra, step):
    objective = Objective.build(recipe(name, **extra))
    assert objective.rows_with_gradient(signal_of(objective, step)) is None


def test_no_row_is_skipped_under_a_loss_of_the_users_own(step):
    row = AlgorithmRow("mine", "reward", "broadcast", lambda logprobs, signal: logprobs, source="")
    objective = Objective.build(Recipe(), row)
    assert objective.rows_with_gradient(objective.signal(step.table)) is None


@pytest.mark.parametrize("name", ["grpo", "reinforce_pp_baseline", "reinforce"])
def test_skipping_rows_changes_neither_loss_nor_gradient(name, table, batch_of, spread_over):
    objective = Objective.build(recipe(name))
    step = table([1, 1, 1, 0], [0, 0, 1, 1], lengths=[2, 1, 1, 3])
    old = torch.linspace(-2, -1, 7)
    signal = objective.signal(step, old)
    weights = objective.weights(step, torch.arange(4))
    kept = objective.rows_with_gradient(signal)
    results = []
    for slots in (range(7), [i for i in range(7) if kept[step.sample_ids[i]]]):
        logprobs = (old + 0.1).requires_grad_()
        batch = batch_of(step, slots)
        gathered = gather(signal, batch)
        loss = objective.policy_loss(
            spread_over(logprobs, batch), None, None, batch, gathered, gather_tokens(weights, batch)
        ).loss
        loss.backward()
        results.append((loss.item(), logprobs.grad))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-7)
    assert torch.equal(results[0][1], results[1][1])


def test_explained_variance_is_on_monte_carlo_returns(table):
    objective = Objective.build(recipe("ppo"))
    step = table([1.0, 0.0], [0, 1], lengths=[2, 2])
    zeros = torch.zeros(4)
    perfect = objective.signal(step, zeros, zeros, torch.tensor([1.0, 1, 0, 0]))
    assert objective.explained_variance(perfect) == pytest.approx(1.0)
    blind = objective.signal(step, zeros, zeros, zeros + 0.5)
    assert objective.explained_variance(blind) == pytest.approx(0.0)
    solved = replace(perfect, credit=torch.ones(2))
    assert objective.explained_variance(solved) is None
    grpo = Objective.build(recipe("grpo"))
    assert grpo.explained_variance(grpo.signal(step, zeros)) is None


def test_what_is_missing_is_named(step, cut_into):
    with pytest.raises(ValueError, match="grpo needs old_logprobs"):
        Objective.build(recipe("grpo")).signal(step.table)
    with pytest.raises(ValueError, match="grpo needs ref_logprobs"):
        Objective.build(recipe("grpo", 1, beta=0.1)).signal(step.table)
    with pytest.raises(ValueError, match="ppo needs values"):
        Objective.build(recipe("ppo", 1, beta=0.0)).signal(step.table)
    batch = cut_into(step.table, 1)[0]
    zeros = torch.zeros(len(batch.slots))
    for extra, words in (
        ({"entropy_coef": 0.1}, "needs the entropy"),
        ({"nll_coef": 0.1}, "needs nll_weights"),
    ):
        objective = Objective.build(recipe("grpo", 1, **extra))
        with pytest.raises(ValueError, match=words):
            objective.policy_loss(zeros, None, None, batch, gather(objective.signal(step.table), batch), zeros)
    plain, with_kl = Objective.build(recipe("grpo", 1)), Objective.build(recipe("grpo", 1, beta=0.1))
    with pytest.raises(ValueError, match="needs ref_logprobs"):
        with_kl.policy_loss(zeros, None, None, batch, gather(plain.signal(step.table), batch), zeros)
    with pytest.raises(ValueError, match="needs old_logprobs in its signal"):
        Objective.build(recipe("grpo")).policy_loss(
            zeros, None, None, batch, gather(plain.signal(step.table), batch), zeros
        )
