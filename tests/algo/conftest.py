"""Factories for a step's table and its batches, without a model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from miles.types import Batch, StepTable


def make_table(
    rewards: Sequence[float],
    group_ids: Sequence[int] | None = None,
    lengths: Sequence[int] | None = None,
    behavior_logprobs: Sequence[float] | None = None,
    baseline_rewards: Sequence[float] | None = None,
    unshaped_rewards: Sequence[float] | None = None,
) -> StepTable:
    count = len(rewards)
    sizes = torch.tensor([1] * count if lengths is None else list(lengths), dtype=torch.int64)
    tokens = int(sizes.sum())
    return StepTable(
        sample_ids=torch.repeat_interleave(torch.arange(count), sizes),
        behavior_logprobs=torch.tensor([-1.0] * tokens if behavior_logprobs is None else list(behavior_logprobs)),
        starts=sizes.cumsum(0) - sizes,
        lengths=sizes,
        group_ids=torch.tensor([0] * count if group_ids is None else list(group_ids), dtype=torch.int64),
        rewards=torch.tensor(list(rewards), dtype=torch.float32),
        unshaped_rewards=torch.tensor(list(rewards if unshaped_rewards is None else unshaped_rewards)).float(),
        baseline_rewards=torch.tensor(list([float("nan")] * count if baseline_rewards is None else baseline_rewards)),
        truncated=torch.zeros(count, dtype=torch.bool),
    )


def make_batch(table: StepTable, slots: Sequence[int]) -> Batch:
    """One batch with the tokens of the table at `slots`, in that order; -1 stands for an untrained token."""
    places = torch.tensor(list(slots), dtype=torch.int64)
    mask = places >= 0
    owners = (
        torch.where(mask, table.sample_ids[places.clamp(min=0)], -1)
        if len(table.sample_ids)
        else torch.full_like(places, -1)
    )
    return Batch(
        token_ids=torch.zeros_like(places),
        position_ids=torch.arange(len(places)),
        node_ids=torch.zeros_like(places),
        parents=torch.tensor([-1]),
        source=torch.arange(len(places)) - 1,
        loss_mask=mask,
        slots=places,
        sample_ids=owners,
        rows=1,
    )


def spread(values: Tensor, batch: Batch, filler: float = float("nan")) -> Tensor:
    """[N] -> [T], with `filler` on the untrained tokens, as a forward may leave there."""
    out = torch.full((len(batch.slots),), filler, dtype=torch.float32)
    return torch.where(batch.loss_mask, values[batch.slots.clamp(min=0)], out)


def cut(table: StepTable, parts: int, gap: int = 2, seed: int = 0) -> list[Batch]:
    """Batches of whole samples in a drawn order, with untrained tokens before each sample."""
    order = list(range(len(table.lengths)))
    random.Random(seed).shuffle(order)
    batches = []
    for part in range(parts):
        slots: list[int] = []
        for sample in order[part::parts]:
            start, length = int(table.starts[sample]), int(table.lengths[sample])
            slots += [-1] * gap + list(range(start, start + length))
        batches.append(make_batch(table, slots))
    return batches


@dataclass(frozen=True)
class Step:
    """One off-policy step: three groups of three samples of different lengths."""

    table: StepTable
    logprobs: Tensor  # [N] now
    old_logprobs: Tensor  # [N]
    ref_logprobs: Tensor  # [N]
    values: Tensor  # [N]
    values_now: Tensor  # [N]


def make_step(seed: int = 0) -> Step:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 4, 2, 5, 3, 6, 2, 3, 4]
    tokens = sum(lengths)

    def draw(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(tokens, generator=generator)

    old = draw(-2.5, -0.5)
    logprobs = (old + draw(-0.9, 0.9)).clamp(max=-0.05)
    table = make_table(
        rewards=[1.0, 0.0, 0.25, 0.0, 1.0, 0.0, 0.9, 0.7, 0.1],
        group_ids=[0, 0, 0, 1, 1, 1, 2, 2, 2],
        lengths=lengths,
        behavior_logprobs=(old + draw(-0.8, 0.8)).tolist(),
        baseline_rewards=[0.5] * 3 + [0.0] * 3 + [1.0] * 3,
    )
    return Step(table, logprobs, old, old + draw(-0.5, 0.5), draw(-0.5, 0.5), draw(-0.5, 0.9))


@pytest.fixture
def table() -> Callable[..., StepTable]:
    return make_table


@pytest.fixture
def batch_of() -> Callable[..., Batch]:
    return make_batch


@pytest.fixture
def spread_over() -> Callable[..., Tensor]:
    return spread


@pytest.fixture
def cut_into() -> Callable[..., list[Batch]]:
    return cut


@pytest.fixture
def step() -> Step:
    return make_step()
