"""The numbers that a ledger works by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from miles.errors import ConfigError


@dataclass(frozen=True)
class LedgerSettings:
    """The numbers that a ledger works by. Raises ConfigError for values that cannot work."""

    groups_per_step: int  # algorithm.groups_per_step
    max_staleness: int = 0  # buffer.max_staleness: S
    max_attempts: int = 3  # buffer.max_attempts: tries of a prompt before it is dropped as dead
    max_dropped: int | None = None  # rollout.max_dropped. None: 10 * groups_per_step
    group_size: int | None = None  # samples of each group. None: any number
    vocabulary: int | None = None  # token ids are below it. None: below 2**31
    keep_dropped: bool = True  # also store the samples of dropped groups
    keep: Literal["all", "checkpoints"] = "all"  # buffer.keep: checkpoints deletes groups below the oldest one kept
    max_refused: float = 0.05  # buffer.max_refused: refused groups / finished ones, above which the run is aborted
    min_free_bytes: int = 0  # buffer.min_free_mb: nothing is leased or stored while the disk has less
    inline_bytes: int = 128 << 10  # payloads of this size and more go to segment files

    def __post_init__(self) -> None:
        lowest = {
            "algorithm.groups_per_step": (self.groups_per_step, 1),
            "buffer.max_staleness": (self.max_staleness, 0),
        }
        lowest["buffer.max_attempts"] = (self.max_attempts, 1)
        if self.max_dropped is not None:
            lowest["rollout.max_dropped"] = (self.max_dropped, 1)
        problems = [
            f"{key} is {value}: it must be at least {low}" for key, (value, low) in lowest.items() if value < low
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def drop_limit(self) -> int:
        """Dropped groups within one step before it trains on what is there."""
        return 10 * self.groups_per_step if self.max_dropped is None else self.max_dropped
