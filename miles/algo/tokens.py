"""Brings the step's per-token data, which stands in the order of the step's table, to the places of one batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.types import Batch, Signal


@dataclass(frozen=True)
class TokenSignal:
    """A `Signal` gathered for one batch; every tensor is 0 (or False, or -1) where `mask` is False."""

    mask: Tensor  # [T] bool, True on trained tokens
    sample_ids: Tensor  # [T] int64, index in the step's samples; -1 off the mask
    lengths: Tensor  # [T] int64, trained tokens of the token's sample, over all of its segments
    num_samples: int  # S, samples of the whole step
    advantages: Tensor  # [T] float32
    behavior_logprobs: Tensor  # [T] float32, under the policy that sampled the token
    old_logprobs: Tensor | None = None  # [T] float32, start of the step; None: the update's own forward, detached
    ref_logprobs: Tensor | None = None  # [T] float32, under the frozen reference
    correction_weights: Tensor | None = None  # [T] float32, weight old/behavior after truncation or masking
    values: Tensor | None = None  # [T] float32, the critic's at the start of the step
    returns: Tensor | None = None  # [T] float32, the critic's targets
    ref_values: Tensor | None = None  # [T] float32
    group_ids: Tensor | None = None  # [T] int64, index of the group in the manifest
    margins: Tensor | None = None  # [T] float32, by how much the chosen answer of the token's pair should lead


def gather_tokens(values: Tensor, batch: Batch) -> Tensor:
    """[N] in the order of the step's table -> [T] at the places of the batch, 0 where its mask is False."""
    if not len(values):
        return values.new_zeros(len(batch.slots))
    return select(values[batch.slots.clamp(min=0)], batch.loss_mask)


def select(values: Tensor, mask: Tensor) -> Tensor:
    """values where mask is True, else 0, whatever stands there: NaN and inf do not pass, nor does their gradient."""
    return torch.where(mask, values, values.new_zeros(()))


def gather(signal: Signal, batch: Batch) -> TokenSignal:
    """The step's signal at the places of one batch."""

    def optional(values: Tensor | None) -> Tensor | None:
        return None if values is None else gather_tokens(values, batch)

    table = signal.table
    return TokenSignal(
        mask=batch.loss_mask,
        sample_ids=batch.sample_ids,
        lengths=gather_tokens(table.lengths[table.sample_ids], batch),
        num_samples=len(table.lengths),
        advantages=gather_tokens(signal.advantages, batch),
        behavior_logprobs=gather_tokens(table.behavior_logprobs, batch),
        old_logprobs=optional(signal.old_logprobs),
        ref_logprobs=optional(signal.ref_logprobs),
        correction_weights=optional(signal.correction_weights),
        values=optional(signal.values),
        returns=optional(signal.returns),
        ref_values=optional(signal.ref_values),
        group_ids=gather_tokens(table.group_ids[table.sample_ids], batch),
        margins=None if table.margins is None else gather_tokens(table.margins[table.sample_ids], batch),
    )
