"""The table of algorithms: each row names small pure functions and the defaults that make them that algorithm.

This module is plain data and imports no torch: a collector and `miles check` read it too. `miles.algo.build` turns the
names of a row into functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

GROUP_CREDITS = ("group_standardized", "group_centred", "leave_one_out", "group_maxrl", "group_optimal_baseline")


@dataclass(frozen=True)
class AlgorithmRow:
    """One algorithm. A function is a name in the module of its kind, or a callable of the same signature."""

    name: str
    credit: str | Callable[..., Any]  # miles.algo.credit: one number a sample
    advantage: str | Callable[..., Any]  # miles.algo.advantage: one number a token
    policy_loss: str | Callable[..., Any]  # miles.algo.losses: [T] token losses
    source: str  # paper and equation
    value_loss: str | Callable[..., Any] | None = None  # miles.algo.losses; None: no critic
    defaults: Mapping[str, Any] = field(default_factory=dict)  # keys of the recipe's [algorithm] section
    group_centred: bool = False  # credit compares the samples of a group: needs >= 2 of them, equal rewards give 0
    one_update: bool = False  # only epochs = minibatches = 1
    bypass_only: bool = False  # correction.mode bypass and no other
    refuses_bypass: bool = False
    nonnegative_rewards: bool = False
    greedy_baseline: bool = False  # collecting adds the reward of the prompt's greedy completion to each group
    drop_equal_rewards: bool = False  # collecting drops groups whose unshaped rewards are all equal, and refills

    @property
    def min_group_size(self) -> int:
        return 2 if self.group_centred else 1

    @property
    def has_critic(self) -> bool:
        return self.value_loss is not None
