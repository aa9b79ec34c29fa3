"""The buffer inside the learner's own process: the sink and source protocols around a ledger, and no thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from miles.buffer.ledger import Ledger
from miles.buffer.rewinding import RewindMode
from miles.errors import DiskFull, ExperienceError
from miles.types import Collected, FinishedGroup, Group, Lease

log = logging.getLogger(__name__)
T = TypeVar("T")
DISK_RETRY_S = 1.0


class EmbeddedBuffer:
    """`ExperienceSink` and `ExperienceSource` in one. `take` runs the collector inline, so nothing samples while weights change.

    A step's collecting ends when the ledger gives no more leases, always, also where its manifest could be filled earlier:
    what is sampled by which weights then does not depend on where a crash fell, and at staleness S a run in one process
    trains on groups as old as an asynchronous one would.
    """

    def __init__(self, ledger: Ledger, *, collect: Callable[[], None]) -> None:
        """`collect` runs a collector on this buffer until `lease` gives nothing and all of its leases are finished.

        Leases of a process that died are given back: the ledger has one process at a time, and this is it.
        """
        self.ledger = ledger
        self._collect = collect
        ledger.release_all()

    async def lease(self, n: int, worker: str, ttl: float) -> list[Lease]:
        """Up to n ordinals; fewer or none while credit is used up, at the drop limit, or after the stream's end.

        While the disk is full, this and `put` and `drop` wait until there is space again.
        """
        return await self._once_there_is_space(lambda: self.ledger.lease(n, worker, ttl))

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """The leases that are still held, with a new expiry."""
        return self.ledger.renew(leases)

    async def put(self, lease: Lease, group: Group) -> None:
        """Store a finished group, durably. Raises LeaseLost and GroupRefused."""
        await self._once_there_is_space(lambda: self.ledger.put(lease, group))

    async def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        """Give up on an ordinal for good. `reason`: a name, or `name: what happened`."""
        await self._once_there_is_space(lambda: self.ledger.drop(lease, reason, group))

    async def release(self, lease: Lease) -> None:
        """Give an ordinal back, to be leased again."""
        self.ledger.release(lease)

    async def _once_there_is_space(self, call: Callable[[], T]) -> T:
        told = False
        while True:
            try:
                return call()
            except DiskFull as full:
                if not told:
                    log.warning("collecting pauses: %s", full)
                told = True
                await asyncio.sleep(DISK_RETRY_S)

    def take(self, version: int) -> list[Group]:
        """The groups of the step's manifest, collected first where it does not exist.

        Raises BufferClosed after the end of the stream, NothingToTrain where every group was dropped, ExperienceError where
        collecting makes no progress, and what the collector raises.
        """
        self.ledger.check_version(version)
        while not self.ledger.manifest(version):
            if self.ledger.waiting():
                self._collect_once()
            elif not self.ledger.create(version) and not self.ledger.waiting():
                raise ExperienceError(
                    f"step {version} cannot be filled: {self.ledger.stats().leased} prompts are leased and nobody collects "
                    "them; the collector must put, drop or release every lease before it returns"
                )
        return self.ledger.groups(version)

    def _collect_once(self) -> None:
        before = self.ledger.progress()
        try:
            self._collect()
        except BaseException:
            # The collector is gone, so nobody holds its leases; where the disk fails too, the next start gives them back.
            with contextlib.suppress(ExperienceError):
                self.ledger.release_all()
            raise
        if self.ledger.progress() == before:
            raise ExperienceError(
                f"the collector returned without finishing or dropping one of {self.ledger.waiting()} waiting prompts: see "
                "its log; a prompt that cannot be collected must be dropped with a reason"
            )

    def finished(self, version: int) -> list[FinishedGroup]:
        """Summaries of every group that finished for this step, in ordinal order, dropped ones too."""
        return self.ledger.finished(version)

    def collected(self, version: int) -> list[Collected]:
        """Who collected the step's groups and when, in ordinal order, dropped ones too."""
        return self.ledger.collected(version)

    def group(self, ordinal: int) -> Group:
        """One finished group; of a dropped one where its samples were kept. Raises ExperienceError."""
        return self.ledger.group(ordinal)

    def short(self, version: int) -> str | None:
        """Why the manifest of `version` holds fewer groups than a step asks for; None where it is full."""
        return self.ledger.short(version)

    def advance(self, version: int) -> None:
        """The learner holds `version` now."""
        self.ledger.advance(version)

    def commit(self, version: int, checkpoint: Path) -> None:
        """`checkpoint` at `version` is the oldest one kept. With `buffer.keep` = "checkpoints" groups below it are deleted."""
        self.ledger.commit(version, checkpoint)

    def rewind(self, version: int, mode: RewindMode = "replay") -> None:
        """The learner starts again from `version` and will take the stored manifests from there, or sample them again."""
        self.ledger.rewind(version, mode)

    def snapshot(self) -> bytes:
        """The ledger without its groups: a checkpoint's part of the buffer, `miles.buffer.ledger.restore` reads it."""
        return b"".join(self.ledger.snapshot())

    def close(self) -> None:
        self.ledger.close()
