"""The seams of Miles: what stands on the two sides of each does not know what the other is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from miles.types import Collected, Completion, FinishedGroup, Group, Lease, PolicyUpdate, Sample, Sampling


class Engine(Protocol):
    """Samples completions: token ids in, token ids out."""

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        """n completions of the prompt `ids`, one for each seed, sampled by weights of at least `min_version`.

        The n completions depend on weights, ids, sampling and seeds only, never on other calls under way, when the
        engine is deterministic.
        """
        ...


class Environment(Protocol):
    """Turns one data row into the samples of its group."""

    async def episodes(
        self, row: Mapping[str, Any], engine: Engine, sampling: Sampling, seeds: Sequence[int]
    ) -> list[Sample]:
        """One sample for each seed. Rewards that the environment itself gives stand in `reward_parts`."""
        ...


class ExperienceSink(Protocol):
    """The collectors' side of the buffer."""

    async def lease(self, n: int, worker: str, ttl: float) -> list[Lease]:
        """Up to n ordinals to collect; fewer, or none, while credit is used up or the stream has ended."""
        ...

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """The leases that are still held, with a new expiry."""
        ...

    async def put(self, lease: Lease, group: Group) -> None:
        """Store a finished group, durably. Putting the same group twice is one row. Raises LeaseLost."""
        ...

    async def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        """Give up on an ordinal for good: a row with a reason, never silence."""
        ...

    async def release(self, lease: Lease) -> None:
        """Give an ordinal back, to be leased again."""
        ...


class ExperienceSource(Protocol):
    """The learner's side of the buffer."""

    def take(self, version: int) -> list[Group]:
        """The groups of the step's manifest, the same for ever. Blocks until it is full; raises BufferClosed."""
        ...

    def finished(self, version: int) -> list[FinishedGroup]:
        """Every group that finished for this step, in ordinal order, dropped ones too."""
        ...

    def collected(self, version: int) -> list[Collected]:
        """Who collected the groups of this step and when, in ordinal order, dropped ones too; those whose times are known."""
        ...

    def group(self, ordinal: int) -> Group:
        """One finished group; of a dropped one where its samples were kept. Raises ExperienceError."""
        ...

    def short(self, version: int) -> str | None:
        """Why the manifest of `version` holds fewer groups than a step asks for; None where it is full."""
        ...

    def snapshot(self) -> bytes:
        """The ledger without its groups: what a checkpoint keeps, so that a lost buffer can be made again."""
        ...

    def advance(self, version: int) -> None:
        """The learner holds `version` now: the groups of the manifests before it are trained."""
        ...

    def commit(self, version: int, checkpoint: Path) -> None:
        """`checkpoint` at `version` is the oldest one kept: what lies below it may be deleted."""
        ...

    def rewind(self, version: int, mode: Literal["replay", "resample"] = "replay") -> None:
        """The learner starts again from `version` and will take the stored manifests from there, or sample them again."""
        ...


class Publisher(Protocol):
    """Brings new weights to the engines."""

    def publish(self, update: PolicyUpdate) -> None: ...


class Reward(Protocol):
    """A user's reward: one number for each completion, or None where it cannot be scored."""

    def __call__(self, prompts: list[Any], completions: list[str], **columns: list[Any]) -> list[float | None]: ...


class MetricsSink(Protocol):
    """A place that metrics rows go to."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Learner(Protocol):
    """What the loop asks of the learner; `learn/learner.py` is the one implementation."""

    version: int
    judged: Sequence[Group]  # of the step that was scored last, where a reward model of the learner's own gave scores

    def pack(self, groups: Sequence[Group]) -> Any:
        """The step's batches."""
        ...

    def score(self, batches: Any) -> Any:
        """All forwards that the update needs; then credit and advantage over the whole step."""
        ...

    def update(self, batches: Any, signals: Any) -> Mapping[str, float]:
        """epochs * minibatches updates; afterwards the version is one higher."""
        ...

    def policy_update(self) -> PolicyUpdate: ...


class Launcher(Protocol):
    """Decides where each role of a run stands, starts them, and ends with the run's exit code."""

    def launch(self) -> int: ...
