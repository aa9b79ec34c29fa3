"""What a step's metrics need of a finished group, computed from the group alone."""

from __future__ import annotations

import math
from itertools import chain, compress

from miles.types import FinishedGroup, Group, Sample

NGRAM = 4


def summarise(group: Group, reason: str | None) -> FinishedGroup:
    """The summary of a group that is trained (`reason` None) or dropped.

    Two completions are the same when their sampled tokens are, segment by segment. `repeat_fraction` is the mean over
    samples of 1 - distinct / all 4-grams of the sampled tokens, 0 for a sample of fewer than 4.
    """
    completions = [_sampled(sample) for sample in group.samples]
    parts = list(dict.fromkeys(name for sample in group.samples for name in sample.reward_parts))
    return FinishedGroup(
        ordinal=group.ordinal,
        reason=reason,
        rewards=tuple(group.rewards),
        reward_parts={name: tuple(sample.reward_parts.get(name) for sample in group.samples) for name in parts},
        lengths=tuple(sample.num_trained for sample in group.samples),
        truncated=tuple(sample.truncated for sample in group.samples),
        unique_fraction=len(set(completions)) / len(completions),
        repeat_fraction=math.fsum(map(_repeated, completions)) / len(completions),
        version_min=version_range(group)[0],
    )


def version_range(group: Group) -> tuple[int, int]:
    """(version_min, version_max) of a group, in one pass. Raises ValueError where nothing was sampled."""
    segments = (segment for sample in group.samples for segment in sample.segments)
    versions = set().union(*(segment.versions for segment in segments)) - {-1}
    return min(versions), max(versions)


def unfinished(ordinal: int, reason: str) -> FinishedGroup:
    """The summary of a prompt that was dropped without samples: its fractions are NaN and its version is -1, no number."""
    return FinishedGroup(
        ordinal=ordinal,
        reason=reason,
        rewards=(),
        reward_parts={},
        lengths=(),
        truncated=(),
        unique_fraction=math.nan,
        repeat_fraction=math.nan,
        version_min=-1,
    )


def _sampled(sample: Sample) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(compress(segment.token_ids, segment.loss_mask)) for segment in sample.segments)


def _repeated(segments: tuple[tuple[int, ...], ...]) -> float:
    tokens = list(chain.from_iterable(segments))
    count = len(tokens) - NGRAM + 1
    if count < 1:
        return 0.0
    distinct = set(zip(*(tokens[start : start + count] for start in range(NGRAM)), strict=True))
    return 1 - len(distinct) / count
