"""What a step's finished groups are with the scores that the learner's reward model gave them after they were stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from miles.types import FinishedGroup, Group


def judged_rows(finished: Sequence[FinishedGroup], judged: Sequence[Group]) -> list[FinishedGroup]:
    """With the rewards and parts of the judged groups; one that was dropped was not scored, and has no reward."""
    groups = {group.ordinal: group for group in judged}
    return [_with_rewards(done, groups.get(done.ordinal)) for done in finished]


def _with_rewards(done: FinishedGroup, group: Group | None) -> FinishedGroup:
    if group is None:
        return replace(done, rewards=tuple(None for _ in done.rewards))
    names = dict.fromkeys(name for sample in group.samples for name in sample.reward_parts)
    parts = {name: tuple(sample.reward_parts.get(name) for sample in group.samples) for name in names}
    return replace(done, rewards=tuple(group.rewards), reward_parts=parts)
