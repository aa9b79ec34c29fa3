"""What a step's finished groups say about reward, length and waste, as the numbers of one metrics row.

A key stands in the result only when it was measured: no sample, no mean.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from math import fsum, sqrt

from miles.types import Collected, FinishedGroup

CORRECT_REWARD = 0.5
"""A sample counts as correct when its reward (unshaped, weighted sum of the parts) is at least this."""

ERROR_REASONS = frozenset({"error", "dead", "quarantined"})
"""Drop reasons that count as `groups/error`; a reason is read up to its first colon, what follows is detail."""


def group_metrics(finished: Sequence[FinishedGroup], version: int | None = None) -> dict[str, float]:
    """The row keys that come from the groups which finished for one step, trained and dropped alike.

    `version` is the learner's when it trained the step; None leaves staleness out. Rewards are unshaped weighted sums,
    lengths are sampled tokens. Means are over samples, never means of group means; `reward/std` is the population
    standard deviation over samples. A sample without a reward counts for lengths and for no reward.

    - `completion/length_correct_mean`, `length_wrong_mean`: samples with reward >= CORRECT_REWARD, and below it.
    - `groups/solved_all`, `groups/solved_none`: groups whose scored rewards are all equal, split by the same threshold.
    - `staleness/groups/<n>`: trained groups of staleness n; a staleness that did not occur has no key.
    - `groups/dropped/<reason>`: dropped groups by reason; a reason that did not occur has no key.
    """
    groups = sorted(finished, key=lambda group: group.ordinal)
    return {
        **_reward_metrics(groups),
        **_completion_metrics(groups),
        **_group_counts(groups),
        **(_staleness_metrics(groups, version) if version is not None else {}),
    }


def recorded_metrics(finished: Sequence[FinishedGroup], lengths: bool) -> dict[str, float]:
    """The row keys of groups that were made of recorded answers: none was sampled, and none has a reward.

    lengths: trained tokens are the answer's own (no scorer's).
    """
    sizes = [length for group in finished for length in group.lengths] if lengths else []
    return {
        "groups/trained": sum(group.reason is None for group in finished),
        "groups/error": sum(is_error(group.reason) for group in finished),
        **({"completion/length_mean": _mean(sizes), "completion/length_max": max(sizes)} if sizes else {}),
    }


def ready_fraction(collected: Sequence[Collected], asked: float) -> float | None:
    """Of a step's groups that were not dropped, the share that was stored when the learner asked (seconds since the epoch).

    1: the learner never waits; 0: it waits for every group. None where no group's times are known.
    """
    kept = [each.end <= asked for each in collected if each.reason is None]
    return sum(kept) / len(kept) if kept else None


def throughput_metrics(finished: Iterable[FinishedGroup], step_s: float) -> dict[str, float]:
    """Samples and sampled tokens of every finished group per second of the whole step; empty when no time passed."""
    if step_s <= 0:
        return {}
    lengths = [length for group in finished for length in group.lengths]
    return {"throughput/samples_per_s": len(lengths) / step_s, "throughput/tokens_per_s": sum(lengths) / step_s}


def is_error(reason: str | None) -> bool:
    return reason is not None and reason_kind(reason) in ERROR_REASONS


def reason_kind(reason: str) -> str:
    """The reason without its detail, as the last part of a metric key: `error: timed out` is `error`."""
    return re.sub(r"[^a-z0-9]+", "_", reason.partition(":")[0].strip().lower()).strip("_") or "other"


def _reward_metrics(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    out: dict[str, float] = {}
    rewards = _scored(reward for group in groups for reward in group.rewards)
    if rewards:
        out["reward/mean"] = mean = _mean(rewards)
        if len(rewards) > 1:
            out["reward/std"] = sqrt(_mean([(reward - mean) ** 2 for reward in rewards]))
    for part in dict.fromkeys(name for group in groups for name in group.reward_parts):
        values = _scored(value for group in groups for value in group.reward_parts.get(part, ()))
        if values:
            out[f"reward/{part}/mean"] = _mean(values)
    trained = _scored(reward for group in groups if group.reason is None for reward in group.rewards)
    if trained:
        out["reward/trained_mean"] = _mean(trained)
    return out


def _completion_metrics(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    sampled = [group for group in groups if group.lengths]
    lengths = [length for group in sampled for length in group.lengths]
    out: dict[str, float] = {"tokens/generated": sum(lengths)}
    if not lengths:
        return out
    out["completion/length_mean"] = _mean(lengths)
    out["completion/length_max"] = max(lengths)
    out["completion/truncated_fraction"] = sum(sum(group.truncated) for group in sampled) / len(lengths)
    out["completion/repeat_fraction"] = fsum(g.repeat_fraction * len(g.lengths) for g in sampled) / len(lengths)
    scored = [
        (reward, length)
        for group in sampled
        for reward, length in zip(group.rewards, group.lengths, strict=True)
        if reward is not None
    ]
    right = [length for reward, length in scored if reward >= CORRECT_REWARD]
    wrong = [length for reward, length in scored if reward < CORRECT_REWARD]
    if right:
        out["completion/length_correct_mean"] = _mean(right)
    if wrong:
        out["completion/length_wrong_mean"] = _mean(wrong)
    out["group/unique_fraction"] = _mean([group.unique_fraction for group in sampled])
    return out


def _group_counts(groups: Sequence[FinishedGroup]) -> dict[str, float]:
    scored = [_scored(group.rewards) for group in groups]
    equal = [rewards[0] for rewards in scored if rewards and min(rewards) == max(rewards)]
    dropped = Counter(reason_kind(group.reason) for group in groups if group.reason is not None)
    return {
        "groups/generated": len(groups),
        "groups/trained": sum(group.reason is None for group in groups),
        "groups/solved_all": sum(reward >= CORRECT_REWARD for reward in equal),
        "groups/solved_none": sum(reward < CORRECT_REWARD for reward in equal),
        "groups/error": sum(is_error(group.reason) for group in groups),
        **{f"groups/dropped/{kind}": count for kind, count in sorted(dropped.items())},
    }


def _staleness_metrics(groups: Sequence[FinishedGroup], version: int) -> dict[str, float]:
    staleness = [version - group.version_min for group in groups if group.reason is None]
    if not staleness:
        return {}
    counts = {f"staleness/groups/{age}": count for age, count in sorted(Counter(staleness).items())}
    return {"staleness/mean": _mean(staleness), "staleness/max": max(staleness), **counts}


def _scored(rewards: Iterable[float | None]) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def _mean(values: Sequence[float]) -> float:
    return fsum(values) / len(values)
