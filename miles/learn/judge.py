"""The reward model as a role of the learner: what it reads of a step's groups, and how its scores become their rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from miles.config.schema import Reward
from miles.errors import RewardError
from miles.learn.step import Step, build_step
from miles.types import Group, Sample, Segment

READS = "judged"
"""Key of a sample's extras: the ids that the reward model reads for it, with one more at the end, where the score stands."""
PART = "reward_model"
"""The part of a reward that the reward model gives."""


def reading(groups: Sequence[Group], version: int) -> Step:
    """One sequence of each scored sample, trained at its last place alone, so that the step's table has one row for each."""
    read = [replace(group, samples=tuple(_read(s) for s in group.samples if s.reward is not None)) for group in groups]
    return build_step(read, version, Reward(), 1)


def with_scores(groups: Sequence[Group], scores: Sequence[float], weight: float) -> list[Group]:
    """The groups with the scores, in the order of `reading`, in their rewards. Raises RewardError for one that is not finite."""
    given = iter(scores)
    return [
        replace(group, samples=tuple(s if s.reward is None else _judged(s, next(given), weight) for s in group.samples))
        for group in groups
    ]


def _read(sample: Sample) -> Sample:
    ids = tuple(sample.extras[READS])
    mask = (*(False for _ in ids[1:]), True)
    return Sample((Segment(ids, mask, (0.0,) * len(ids), (-1,) * len(ids)),), "stop", "", reward=0.0)


def _judged(sample: Sample, score: float, weight: float) -> Sample:
    if not math.isfinite(score):
        raise RewardError(
            f"the reward model of reward.model gave a score of {score} for the answer {sample.text[:80]!r}: its adapter, or the "
            "base that it stands on, is damaged; put the right ones back"
        )
    assert sample.reward is not None
    return replace(sample, reward=sample.reward + weight * score, reward_parts={**sample.reward_parts, PART: score})
