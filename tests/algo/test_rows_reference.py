"""Every row against a slow, obvious reference: plain Python floats, one token at a time, gradients by differences.

The reference shares no code with the package: it is written from the formulas of docs/algorithms.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev

import pytest
import torch

from miles.algo import ROWS
from miles.algo.build import Objective, gather
from miles.config.schema import Recipe

L_MAX = 8
CAP = 2.0  # of the default correction


@dataclass
class Data:
    """The step as lists of lists: one list of tokens a sample."""

    rewards: list[float]
    groups: list[int]
    baselines: list[float]
    old: list[list[float]]
    mu: list[list[float]]
    ref: list[list[float]]
    values: list[list[float]]

    @property
    def lengths(self) -> list[int]:
        return [len(x) for x in self.old]


def mean_of_group(data, i):
    return fmean(r for r, g in zip(data.rewards, data.groups, strict=True) if g == data.groups[i])


def group_of(data, i):
    return [j for j, g in enumerate(data.groups) if g == data.groups[i]]


def credit(name, data, i):
    r, members = data.rewards[i], group_of(data, i)
    if name in ("grpo", "dapo", "gspo", "cispo", "dppo"):
        return (r - mean_of_group(data, i)) / (stdev(data.rewards[j] for j in members) + 1e-6)
    if name in ("dr_grpo", "reinforce_pp_baseline"):
        return r - mean_of_group(data, i)
    if name == "rloo":
        return r - fmean(data.rewards[j] for j in members if j != i)
    if name == "maxrl":
        return (r - mean_of_group(data, i)) / mean_of_group(data, i)
    if name == "opo":
        tokens = sum(data.lengths[j] for j in members)
        return r - sum(data.lengths[j] * data.rewards[j] for j in members) / tokens
    if name == "reinforce":
        return r - fmean(data.rewards)
    if name == "remax":
        return r - data.baselines[i]
    return r


def token_rewards(data, i, beta):
    out = [-beta * (o - f) for o, f in zip(data.old[i], data.ref[i], strict=True)]
    out[-1] += data.rewards[i]
    return out


def gae(rewards, values, lam):
    out, next_value, a = [0.0] * len(rewards), 0.0, 0.0
    for t in reversed(range(len(rewards))):
        a = rewards[t] + next_value - values[t] + lam * a
        next_value, out[t] = values[t], a
    return out


def whiten(rows):
    flat = [x for row in rows for x in row]
    mean = fmean(flat)
    std = math.sqrt(fmean((x - mean) ** 2 for x in flat) + 1e-8)
    return [[(x - mean) / std for x in row] for row in rows]


def advantages(name, data):
    samples = range(len(data.rewards))
    if name == "reinforce_pp":
        rows = [token_rewards(data, i, 0.01) for i in samples]
        return whiten([[sum(row[t:]) for t in range(len(row))] for row in rows])
    if name == "ppo":
        return whiten([gae(token_rewards(data, i, 0.01), data.values[i], 0.95) for i in samples])
    if name == "vapo":
        lams = [min(max(1 - 1 / (0.3 * c), 0), 1) for c in data.lengths]
        return whiten([gae(token_rewards(data, i, 0.0), data.values[i], lams[i]) for i in samples])
    rows = [[credit(name, data, i)] * data.lengths[i] for i in samples]
    return whiten(rows) if name == "reinforce_pp_baseline" else rows


def token_loss(name, a, now, held, old, mu, s_held):
    """`held` is `now` without gradient, `s_held` the mean of held - old over the sample."""
    clip = {"gspo": (3e-4, 4e-4), "dapo": (0.2, 0.28), "vapo": (0.2, 0.28)}.get(name, (0.2, 0.2))
    if name in ("opo", "reinforce", "remax"):
        return -min(math.exp(held - mu), 2.0) * a * now
    if name == "cispo":
        return -min(math.exp(held - old), 5.0) * a * now
    if name == "dppo":
        moved = math.exp(held) - math.exp(mu)
        keep = moved <= 0.2 if a > 0 else moved >= -0.2
        return -keep * min(math.exp(held - mu), 20.0) * a * now
    ratio = math.exp(s_held) * math.exp(now - held) if name == "gspo" else math.exp(now - old)
    return max(-a * ratio, -a * min(max(ratio, 1 - clip[0]), 1 + clip[1]))


def weight(name, data, i):
    samples, tokens = len(data.rewards), sum(data.lengths)
    if name in ("grpo", "gspo"):
        return 1 / (data.lengths[i] * samples)
    return 1 / (samples * L_MAX) if name == "dr_grpo" else 1 / tokens


def total_loss(name, data, now, held):
    loss, made = 0.0, advantages(name, data)
    bypass = name in ("opo", "reinforce", "remax", "dppo")
    correct_tokens = sum(c for c, r in zip(data.lengths, data.rewards, strict=True) if r >= 0.5)
    for i, length in enumerate(data.lengths):
        s_held = fmean(h - o for h, o in zip(held[i], data.old[i], strict=True))
        for t in range(length):
            old, mu = data.old[i][t], data.mu[i][t]
            correction = 1.0 if bypass else min(math.exp(old - mu), CAP)
            x = token_loss(name, made[i][t], now[i][t], held[i][t], old, mu, s_held)
            loss += weight(name, data, i) * correction * x
            if name == "vapo" and data.rewards[i] >= 0.5:
                loss += 0.1 * -now[i][t] / correct_tokens
    return loss


def slope(name, data, now, i, t, h=1e-6):
    up, down = ([list(row) for row in now] for _ in range(2))
    up[i][t] += h
    down[i][t] -= h
    return (total_loss(name, data, up, now) - total_loss(name, data, down, now)) / (2 * h)


def lists(step, values):
    rows = torch.split(values.double(), step.table.lengths.tolist())
    return [row.tolist() for row in rows]


@pytest.mark.parametrize("name", list(ROWS))
def test_loss_and_gradient_equal_the_reference(name, step, cut_into, spread_over):
    row, table = ROWS[name], step.table
    extra = {"vapo_alpha": 0.3} if name == "vapo" else {}
    recipe = Recipe.model_validate(
        {
            "algorithm": {"name": name, **row.defaults, **extra},
            "learner": {"epochs": 1 if row.one_update else 2},
            "rollout": {"max_new_tokens": L_MAX},
        }
    )
    objective = Objective.build(recipe)
    signal = objective.signal(
        table,
        step.old_logprobs if objective.needs_old else None,
        step.ref_logprobs if objective.needs_ref else None,
        step.values if objective.needs_critic else None,
    )
    everyone = torch.arange(len(table.lengths))
    weights, nll = objective.weights(table, everyone), objective.nll_weights(table, everyone)
    logprobs, loss = step.logprobs.clone().requires_grad_(), 0.0
    for batch in cut_into(table, 3):
        out = objective.policy_loss(
            spread_over(logprobs, batch),
            None,
            None,
            batch,
            gather(signal, batch),
            spread_over(weights, batch),
            nll_weights=spread_over(nll, batch) if objective.needs_nll else None,
        )
        out.loss.backward()
        loss += out.loss.item()

    data = Data(
        table.rewards.tolist(),
        table.group_ids.tolist(),
        table.baseline_rewards.tolist(),
        lists(step, step.old_logprobs),
        lists(step, table.behavior_logprobs),
        lists(step, step.ref_logprobs),
        lists(step, step.values),
    )
    now = lists(step, step.logprobs)
    expected = [slope(name, data, now, i, t) for i, c in enumerate(data.lengths) for t in range(c)]
    assert loss == pytest.approx(total_loss(name, data, now, now), rel=1e-4, abs=1e-6)
    assert logprobs.grad.tolist() == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("name", "lam"), [("ppo", 0.95), ("vapo", 1.0)])
def test_the_critics_targets_equal_the_reference(name, lam, step):
    row = ROWS[name]
    objective = Objective.build(Recipe.model_validate({"algorithm": {"name": name, **row.defaults}}))
    signal = objective.signal(step.table, step.old_logprobs, step.ref_logprobs, step.values)
    beta = row.defaults["beta"]
    old, ref, values = lists(step, step.old_logprobs), lists(step, step.ref_logprobs), lists(step, step.values)
    data = Data(step.table.rewards.tolist(), [], [], old, old, ref, values)
    expected = [
        a + v
        for i in range(len(values))
        for a, v in zip(gae(token_rewards(data, i, beta), values[i], lam), values[i], strict=True)
    ]
    assert signal.returns.tolist() == pytest.approx(expected, abs=1e-5)
