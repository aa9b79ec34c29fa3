"""One made-up step through a user's own row, so that what it cannot do is said before a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from miles.algo import DATA_ROWS, ROWS, AlgorithmRow
from miles.algo.build import Objective, gather, gather_tokens
from miles.errors import ConfigError
from miles.types import Batch, StepTable

if TYPE_CHECKING:
    from miles.config.schema import Recipe


def rehearse(recipe: Recipe, row: AlgorithmRow) -> None:
    """Credit, advantage and losses of a few short samples with rewards 0 and 1, backward too. Rows of ours pass untried.

    Raises ConfigError, which names the row's function and what is wrong with it.
    """
    if {**ROWS, **DATA_ROWS}.get(row.name) is row:
        return
    objective = Objective.build(recipe, row)
    size = row.samples_in_group(recipe.rollout.group_size)
    table = _table(min(2, recipe.algorithm.groups_per_step), size, row)
    try:
        _step(objective, table, _batch(table))
    except ValueError as error:  # of the parts of ours that the row puts together
        raise ConfigError(f"algorithm.name = {row.name}: its parts do not fit together: {error}.") from error


def _step(objective: Objective, table: StepTable, batch: Batch) -> None:
    def scored(needed: bool) -> torch.Tensor | None:
        return table.behavior_logprobs.clone() if needed else None

    signal = objective.signal(
        table, scored(objective.needs_old), scored(objective.needs_ref), scored(objective.needs_critic)
    )
    chosen = torch.arange(len(table.lengths))
    gathered = gather(signal, batch)
    outputs = gather_tokens(table.behavior_logprobs, batch).requires_grad_()
    loss = objective.policy_loss(
        outputs, -outputs, None, batch, gathered, gather_tokens(objective.weights(table, chosen), batch),
        nll_weights=gather_tokens(objective.nll_weights(table, chosen), batch) if objective.needs_nll else None,
    ).loss  # fmt: skip
    if objective.needs_critic:
        weights = gather_tokens(objective.value_weights(table, chosen), batch)
        loss = loss + objective.value_loss(outputs, gathered, weights).loss
    loss.backward()


def _table(groups: int, size: int, row: AlgorithmRow) -> StepTable:
    """Samples of one to three tokens, of a scorer one place each; every second one has the reward 1."""
    samples = torch.arange(groups * size)
    lengths = torch.ones_like(samples) if row.scorer else samples % 3 + 1
    rewards = (samples % 2).float()
    return StepTable(
        sample_ids=torch.repeat_interleave(samples, lengths),
        behavior_logprobs=-torch.ones(int(lengths.sum())),
        starts=lengths.cumsum(0) - lengths,
        lengths=lengths,
        group_ids=samples // size,
        rewards=rewards,
        unshaped_rewards=rewards,
        baseline_rewards=torch.full_like(rewards, 0.5 if row.greedy_baseline else torch.nan),
        truncated=torch.zeros(len(samples), dtype=torch.bool),
    )


def _batch(table: StepTable) -> Batch:
    """One row: an untrained token, then every token of the table."""
    slots = torch.arange(len(table.sample_ids) + 1) - 1
    return Batch(
        token_ids=torch.zeros_like(slots),
        position_ids=slots + 1,
        node_ids=torch.zeros_like(slots),
        parents=torch.tensor([-1]),
        source=slots,
        loss_mask=slots >= 0,
        slots=slots,
        sample_ids=torch.cat([torch.tensor([-1]), table.sample_ids]),
        rows=1,
    )
