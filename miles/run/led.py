"""The loop's keeper and source on several ranks: rank 0 has the real ones, and the others follow it through every call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from miles.buffer.rewinding import RewindMode
from miles.protocols import ExperienceSource
from miles.run.crew import Crew
from miles.run.duties import broadcast_groups
from miles.run.interrupts import Interrupts
from miles.run.keeper import RunKeeper
from miles.types import Collected, FinishedGroup, Group

log = logging.getLogger(__name__)


class LedKeeper:
    """The `miles.loop.Keeper` of a rank. Signals are looked at between two steps, where all ranks stop together."""

    def __init__(self, crew: Crew, keeper: RunKeeper | None, interrupts: Interrupts) -> None:
        """`keeper`: on rank 0."""
        self._crew, self._keeper, self._interrupts = crew, keeper, interrupts

    def span(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._keeper is None else self._keeper.span(name)

    def whole(self) -> AbstractContextManager[None]:
        return self._interrupts.whole()

    def begin(self) -> None:
        self._together(lambda keeper: keeper.begin())

    def wants_more(self) -> bool:
        return self._crew.agree(self._decide)

    def log_step(self, metrics: Mapping[str, float]) -> None:
        self._together(lambda keeper: keeper.log_step(metrics))

    def after_step(self) -> None:
        self._together(lambda keeper: keeper.after_step())

    def end(self) -> None:
        self._together(lambda keeper: keeper.end())

    def abort(self, metrics: Mapping[str, float]) -> None:
        self._together(lambda keeper: keeper.abort(metrics))

    def fail(self) -> None:
        self._together(lambda keeper: keeper.fail())

    def save_checkpoint(self) -> None:
        self._together(lambda keeper: keeper.save_checkpoint())

    def _decide(self) -> bool:
        assert self._keeper is not None
        self._interrupts.check()
        return self._keeper.wants_more()

    def _together(self, action: Callable[[RunKeeper], None]) -> None:
        keeper = self._keeper
        self._crew.together(lambda: None if keeper is None else action(keeper))


class LedSource:
    """The `ExperienceSource` of a rank: every rank takes the same groups, out of the ledger that rank 0 holds."""

    def __init__(self, crew: Crew, buffer: ExperienceSource | None) -> None:
        """`buffer`: on rank 0."""
        self._crew, self._buffer = crew, buffer

    def take(self, version: int) -> list[Group]:
        """The groups of the step's manifest. Raises on every rank what the buffer raises."""
        if self._crew.size > 1:
            log.info("rank %d of %d begins step %d", self._crew.channel.rank, self._crew.size, version + 1)
        groups = self._crew.together(lambda: None if self._buffer is None else self._buffer.take(version))
        return broadcast_groups(groups, self._crew.channel)

    def finished(self, version: int) -> list[FinishedGroup]:
        """On rank 0; the others log nothing."""
        return [] if self._buffer is None else self._buffer.finished(version)

    def collected(self, version: int) -> list[Collected]:
        """On rank 0; the others log nothing."""
        return [] if self._buffer is None else self._buffer.collected(version)

    def group(self, ordinal: int) -> Group:
        """On rank 0, whose keeper alone asks."""
        assert self._buffer is not None
        return self._buffer.group(ordinal)

    def short(self, version: int) -> str | None:
        return None if self._buffer is None else self._buffer.short(version)

    def snapshot(self) -> bytes:
        return b"" if self._buffer is None else self._buffer.snapshot()

    def advance(self, version: int) -> None:
        if self._buffer is not None:
            self._buffer.advance(version)

    def commit(self, version: int, checkpoint: Path) -> None:
        if self._buffer is not None:
            self._buffer.commit(version, checkpoint)

    def rewind(self, version: int, mode: RewindMode = "replay") -> None:
        if self._buffer is not None:
            self._buffer.rewind(version, mode)
