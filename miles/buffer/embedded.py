"""The buffer inside the learner's own process: the sink and source protocols around a ledger, and no thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

from miles.buffer.ledger import Ledger
from miles.errors import ExperienceError
from miles.types import FinishedGroup, Group, Lease


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
        """Up to n ordinals; fewer or none while credit is used up, at the drop limit, or after the stream's end."""
        return self.ledger.lease(n, worker, ttl)

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """The leases that are still held, with a new expiry."""
        return self.ledger.renew(leases)

    async def put(self, lease: Lease, group: Group) -> None:
        """Store a finished group, durably. Raises LeaseLost and GroupRefused."""
        self.ledger.put(lease, group)

    async def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        """Give up on an ordinal for good. `reason`: a name, or `name: what happened`."""
        self.ledger.drop(lease, reason, group)

    async def release(self, lease: Lease) -> None:
        """Give an ordinal back, to be leased again."""
        self.ledger.release(lease)

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

    def advance(self, version: int) -> None:
        """The learner holds `version` now."""
        self.ledger.advance(version)

    def commit(self, version: int, checkpoint: Path) -> None:
        """`checkpoint` at `version` is the oldest one kept. The embedded buffer keeps everything all the same."""
        self.ledger.commit(version, checkpoint)

    def rewind(self, version: int) -> None:
        """The learner starts again from `version` and will take the stored manifests from there."""
        self.ledger.rewind(version)

    def close(self) -> None:
        self.ledger.close()
