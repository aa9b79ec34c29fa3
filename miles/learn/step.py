"""From finished groups to a step's table, and which groups each of its updates trains."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from miles.algo.shaping import shape_rewards
from miles.errors import DataError
from miles.learn.tree import Ints
from miles.types import Group, Sample, StepTable

if TYPE_CHECKING:
    from miles.config.schema import Reward


@dataclass(frozen=True)
class TrainedSegment:
    """A segment as far as it is trained."""

    sample: int  # index in the step's samples
    token_ids: Ints  # [n] up to its last trained token
    places: Ints  # [m] of its trained tokens
    slots: Ints  # [m] of its trained tokens in the step's table

    @property
    def inputs(self) -> Ints:
        """[n - 1] what the model reads: nothing is predicted from the last token."""
        return self.token_ids[:-1]


@dataclass(frozen=True)
class Step:
    """What one step trains: its table, and of each sample in it the segments with trained tokens."""

    table: StepTable  # on the CPU
    segments: tuple[tuple[TrainedSegment, ...], ...]  # S
    num_groups: int  # of the manifest
    version: int  # the learner's, before the step
    groups: tuple[Group, ...]  # what it was made of

    @property
    def samples(self) -> range:
        return range(len(self.segments))

    def samples_of(self, groups: Sequence[int]) -> list[int]:
        """Samples of these groups, ascending."""
        chosen = set(groups)
        return [i for i, group in enumerate(self.table.group_ids.tolist()) if group in chosen]


def build_step(groups: Sequence[Group], version: int, reward: Reward, max_new_tokens: int) -> Step:
    """The table in the order of the manifest, whatever the packing. Unscored and masked samples are left out of it.

    Raises DataError for a sample without a trained token, and for a trained token with nothing before it.
    """
    rows: list[tuple[int, float, float, float, bool, float]] = []
    segments: list[tuple[TrainedSegment, ...]] = []
    behavior: list[float] = []
    for index, group in enumerate(groups):
        shaped = shape_rewards(group.samples, reward, max_new_tokens)
        baseline = float("nan") if group.baseline_reward is None else group.baseline_reward
        for sample, value in zip(group.samples, shaped, strict=True):
            if value is None or sample.reward is None:
                continue
            segments.append(_segments(sample, len(rows), len(behavior), group.ordinal))
            behavior += [p for s in sample.segments for p, m in zip(s.behavior_logprobs, s.loss_mask, strict=True) if m]
            rows.append((index, value, sample.reward, baseline, sample.truncated, sample.extras.get("margin", 0.0)))
    return Step(_table(rows, segments, behavior), tuple(segments), len(groups), version, tuple(groups))


def minibatches(seed: int, version: int, epoch: int, groups: int, parts: int) -> list[list[int]]:
    """The groups of each update of one pass: a permutation drawn from (seed, version, epoch), cut into equal parts.

    Where `parts` does not divide `groups` (a short last manifest) the parts differ by one, and some may be empty.
    """
    order = list(range(groups))
    random.Random(f"minibatches {seed} {version} {epoch}").shuffle(order)
    size, longer = divmod(groups, parts)
    cuts = [part * size + min(part, longer) for part in range(parts + 1)]
    return [sorted(order[a:b]) for a, b in pairwise(cuts)]


def _segments(sample: Sample, index: int, slot: int, ordinal: int) -> tuple[TrainedSegment, ...]:
    out = []
    for segment in sample.segments:
        places = np.flatnonzero(np.asarray(segment.loss_mask, dtype=bool))
        if not len(places):
            continue
        if places[0] == 0:
            raise DataError(
                f"ordinal {ordinal}: the first token of a segment is trained, but nothing predicts it; a prompt needs at "
                "least one token (use a model with a BOS token, or a prompt that is not empty)."
            )
        tokens = np.asarray(segment.token_ids[: places[-1] + 1], dtype=np.int64)
        out.append(TrainedSegment(index, tokens, places, np.arange(slot, slot + len(places))))
        slot += len(places)
    if not out:
        raise DataError(
            f"ordinal {ordinal}: a scored sample has no sampled token, so there is nothing to train; its environment must "
            "let the engine generate, or give the sample no reward (None)."
        )
    return tuple(out)


def _table(
    rows: Sequence[tuple[int, float, float, float, bool, float]],
    segments: Sequence[tuple[TrainedSegment, ...]],
    behavior: Sequence[float],
) -> StepTable:
    lengths = torch.tensor([sum(len(s.slots) for s in sample) for sample in segments], dtype=torch.int64)
    group_ids, rewards, unshaped, baselines, truncated, margins = zip(*rows, strict=True) if rows else ((),) * 6
    return StepTable(
        sample_ids=torch.repeat_interleave(torch.arange(len(rows)), lengths),
        behavior_logprobs=torch.tensor(behavior, dtype=torch.float32),
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        group_ids=torch.tensor(group_ids, dtype=torch.int64),
        rewards=torch.tensor(rewards, dtype=torch.float32),
        unshaped_rewards=torch.tensor(unshaped, dtype=torch.float32),
        baseline_rewards=torch.tensor(baselines, dtype=torch.float32),
        truncated=torch.tensor(truncated, dtype=torch.bool),
        margins=torch.tensor(margins, dtype=torch.float32),
    )
