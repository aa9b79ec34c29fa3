"""The held-out evaluation: the same episodes and rewards as in training, with seeds that never change."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from miles.config import schema
from miles.errors import EpisodeError, RewardError
from miles.rollout.episode import Episodes, greedy
from miles.rollout.seeds import evaluation_seeds
from miles.types import Group

log = logging.getLogger(__name__)

TOLERANCE = 1e-9  # a weighted sum of ones may miss the full reward by rounding


@dataclass(frozen=True)
class Evaluation:
    """Held-out groups, sampled and greedy, in the order of the rows."""

    sampled: tuple[Group, ...]
    greedy: tuple[Group, ...]  # one sample each; empty when eval.greedy is off


async def evaluate(
    rows: Sequence[Mapping[str, Any]], episodes: Episodes, *, recipe: schema.Recipe, full_reward: float | None = 1.0
) -> dict[str, float]:
    """The eval metrics of the current weights: `run_evaluation` and then `evaluation_metrics`."""
    return evaluation_metrics(await run_evaluation(rows, episodes, recipe=recipe), full_reward)


async def run_evaluation(
    rows: Sequence[Mapping[str, Any]], episodes: Episodes, *, recipe: schema.Recipe, chosen: Sequence[int] | None = None
) -> Evaluation:
    """`eval.samples` completions of each row at the training temperature, and its greedy one where `eval.greedy` is on.

    `chosen`: places of the rows that are evaluated here, None: of all; what a row gives does not depend on the others. A row whose reward or environment fails is tried up to `buffer.max_attempts` times; then its error is raised.
    """
    samples = recipe.eval.samples
    chosen = range(len(rows)) if chosen is None else chosen
    calls = [_group(episodes, index, rows[index], recipe, samples) for index in chosen]
    if recipe.eval.greedy:
        likeliest = replace(episodes, sampling=greedy(episodes.sampling))
        calls += [_group(likeliest, index, rows[index], recipe, 1) for index in chosen]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        groups = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Evaluation(tuple(groups[: len(chosen)]), tuple(groups[len(chosen) :]))


def evaluation_metrics(evaluation: Evaluation, full_reward: float | None = 1.0) -> dict[str, float]:
    """What an eval row of metrics.jsonl holds; a number that was not measured is absent.

    `eval/reward/mean` over all scored samples; `eval/standard_error` of that mean with the samples of a prompt taken
    together (they are not independent); `eval/reward/greedy`; `eval/samples`, scored ones; `eval/reward/<part>/mean`;
    `eval/pass@k` for k = 1 and k = samples of a prompt, where a sample is solved at a reward of `full_reward` or more:
    1 - C(n - c, k) / C(n, k), arXiv:2107.03374, equation 1; absent where `full_reward` is None.
    """
    rewards = [[r for r in group.rewards if r is not None] for group in evaluation.sampled]
    rewards = [group for group in rewards if group]
    metrics: dict[str, float] = {"eval/samples": float(sum(len(group) for group in rewards))}
    if rewards:
        metrics["eval/reward/mean"] = mean = _mean([r for group in rewards for r in group])
        if len(rewards) > 1:
            metrics["eval/standard_error"] = _clustered_error(rewards, mean)
        if full_reward is not None:
            metrics |= _pass_metrics(rewards, full_reward)
        metrics |= _part_means(evaluation.sampled)
    likeliest = [r for group in evaluation.greedy for r in group.rewards if r is not None]
    if likeliest:
        metrics["eval/reward/greedy"] = _mean(likeliest)
    return metrics


def _pass_metrics(rewards: Sequence[Sequence[float]], full_reward: float) -> dict[str, float]:
    solved = [[r >= full_reward - TOLERANCE for r in group] for group in rewards]
    metrics = {}
    for k in sorted({1, max(len(group) for group in rewards)}):
        whole = [group for group in solved if len(group) >= k]
        metrics[f"eval/pass@{k}"] = _mean([pass_at(k, len(group), sum(group)) for group in whole])
    return metrics


def pass_at(k: int, n: int, correct: int) -> float:
    """Chance that k of n samples drawn without replacement hold at least one of the `correct` ones; k <= n."""
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


async def _group(episodes: Episodes, index: int, row: Mapping[str, Any], recipe: schema.Recipe, n: int) -> Group:
    seeds = evaluation_seeds(recipe.run.seed, index, n)
    for _ in range(recipe.buffer.max_attempts - 1):
        try:
            return await episodes.group(index, index, row, seeds)
        except (RewardError, EpisodeError) as error:
            log.warning("held-out row %d is tried again: %s", index, error)
    return await episodes.group(index, index, row, seeds)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _clustered_error(rewards: Sequence[Sequence[float]], mean: float) -> float:
    """sqrt(P / (P - 1) * sum_p (sum_i (r_pi - mean))^2) / N: with equal counts, that of the P prompt means."""
    prompts, samples = len(rewards), sum(len(group) for group in rewards)
    spread = math.fsum(math.fsum(r - mean for r in group) ** 2 for group in rewards)
    return math.sqrt(spread * prompts / (prompts - 1)) / samples


def _part_means(groups: Sequence[Group]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for group in groups:
        for sample in group.samples:
            for name, value in sample.reward_parts.items():
                if value is not None:
                    parts.setdefault(name, []).append(value)
    return {f"eval/reward/{name}/mean": _mean(values) for name, values in parts.items()}
