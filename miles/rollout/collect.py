"""The collector: leases ordinals, makes their groups all at once, and puts, drops or releases each one."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from miles.algo import AlgorithmRow
from miles.config import schema
from miles.errors import EpisodeError, GroupRefused, LeaseLost, RewardError
from miles.protocols import ExperienceSink
from miles.rollout.filters import ERROR, drop_reason
from miles.rollout.seeds import sample_seeds
from miles.types import Group, Lease, Prompt

log = logging.getLogger(__name__)


class Stream(Protocol):
    """The run's endless prompt stream."""

    def at(self, ordinal: int) -> Prompt: ...


class GroupMaker(Protocol):
    """Makes the group of a row: `Episodes` samples it, `Recorded` reads it."""

    def at_least(self, version: int, on_answer: Callable[[], None]) -> GroupMaker:
        """The same, with tokens of at least `version`; `on_answer` is called at each sign of progress."""
        ...

    async def group(
        self, ordinal: int, index: int, row: Mapping[str, Any], seeds: Sequence[int], *, greedy_baseline: bool = False
    ) -> Group: ...


class Collector:
    """Turns leases into groups until the sink has no more to give.

    All leased groups run at the same time, so that the engine batches them. A group is whole or absent: when one of its
    samples fails, all of it is tried again from the start, up to `buffer.max_attempts` times, and then dropped with the
    reason `error`. When the first `algorithm.groups_per_step` attempts of a step all fail, the cause is the reward and
    not a row: the run stops with that error.
    """

    def __init__(
        self,
        sink: ExperienceSink,
        stream: Stream,
        rows: Sequence[Mapping[str, Any]],
        episodes: GroupMaker,
        *,
        recipe: schema.Recipe,
        row: AlgorithmRow,
        worker: str = "collector-0",
        capacity: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`row`: what collecting must do for the algorithm. `capacity`: groups under way at a time; None: all that may be.

        `clock` counts seconds.
        """
        self._sink = sink
        self._stream = stream
        self._rows = rows
        self._episodes = episodes
        self._recipe = recipe
        self._row = row
        self._worker = worker
        self._clock = clock
        self._ttl = recipe.buffer.lease_s
        self._capacity = capacity or recipe.algorithm.groups_per_step * (recipe.buffer.max_staleness + 1)
        self._running: dict[asyncio.Task[bool], Lease] = {}
        self._failures: Counter[int] = Counter()  # failed attempts of each ordinal
        self._step = _FirstAttempts(recipe.algorithm.groups_per_step)
        self._progress = asyncio.Event()
        self._renewed_at = 0.0

    async def run(self) -> int:
        """Collects until the sink gives no more leases. Returns the number of groups put; raises what stops the run.

        However it ends, no lease is left behind: what was not finished is released.
        """
        self._progress = asyncio.Event()
        self._renewed_at = self._clock()
        put = 0
        leasing: asyncio.Task[list[Lease]] | None = None
        renewing = asyncio.ensure_future(self._renew_on_progress())
        try:
            ask = True
            while True:
                if ask and leasing is None and len(self._running) < self._capacity:
                    leasing = asyncio.ensure_future(self._lease())
                waiting = {*self._running, renewing, *([leasing] if leasing else [])}
                if waiting == {renewing}:
                    return put
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if leasing in done:
                    # Nothing to lease now: a group that finishes may free credit, so ask again after the next one.
                    ask = self._start(leasing.result())
                    leasing = None
                for task in done & self._running.keys():
                    ask = True
                    put += task.result()
                    del self._running[task]
                if renewing in done:
                    renewing.result()
        finally:
            await self._stop([renewing, *([leasing] if leasing else [])])

    async def _lease(self) -> list[Lease]:
        return await self._sink.lease(self._capacity - len(self._running), self._worker, self._ttl)

    def _start(self, leases: Sequence[Lease]) -> bool:
        for lease in leases:
            self._running[asyncio.ensure_future(self._collect(lease))] = lease
        return bool(leases)

    async def _collect(self, lease: Lease) -> bool:
        """One attempt at one ordinal; True when its group was put."""
        try:
            group = await self._group(lease)
        except (RewardError, EpisodeError) as error:
            await self._failed(lease, error)
            return False
        self._step.finished(lease, error=None)
        reason = drop_reason(group, self._row)
        try:
            if reason is None:
                await self._sink.put(lease, group)
            else:
                await self._sink.drop(lease, reason, group)
        except LeaseLost as error:
            log.warning("ordinal %d now belongs to another collector: %s", lease.ordinal, error)
            return False
        except GroupRefused as error:  # the buffer has counted it; where it keeps happening, it stops the run
            await self._failed(lease, error)
            return False
        self._failures.pop(lease.ordinal, None)
        return reason is None

    async def _group(self, lease: Lease) -> Group:
        prompt = self._stream.at(lease.ordinal)
        seeds = sample_seeds(self._recipe.run.seed, lease.ordinal, self._recipe.rollout.group_size)
        episodes = self._episodes.at_least(lease.min_version, self._progress.set)
        group = await episodes.group(
            lease.ordinal,
            prompt.row,
            self._rows[prompt.row],
            seeds,
            greedy_baseline=self._row.greedy_baseline,
        )
        self._progress.set()
        return group

    async def _failed(self, lease: Lease, error: RewardError | EpisodeError | GroupRefused) -> None:
        self._failures[lease.ordinal] += 1
        attempts, most = self._failures[lease.ordinal], self._recipe.buffer.max_attempts
        log.warning("ordinal %d, attempt %d of %d: %s", lease.ordinal, attempts, most, error)
        try:
            if attempts < most:
                await self._sink.release(lease)
            else:
                del self._failures[lease.ordinal]
                await self._sink.drop(lease, f"{ERROR}: {error}")
        except LeaseLost as lost:
            log.warning("ordinal %d now belongs to another collector: %s", lease.ordinal, lost)
        self._step.finished(lease, error)

    async def _renew_on_progress(self) -> None:
        """Renews all leases when something moved and a third of their time has passed; ends those that are lost."""
        while True:
            await self._progress.wait()
            self._progress.clear()
            if self._clock() - self._renewed_at < self._ttl / 3:
                continue
            self._renewed_at = self._clock()
            held = dict(self._running)
            kept = {lease.lease_id for lease in await self._sink.renew(list(held.values()))}
            for task, lease in held.items():
                if lease.lease_id not in kept and not task.done():
                    log.warning("ordinal %d now belongs to another collector: its lease was not renewed", lease.ordinal)
                    self._running.pop(task, None)
                    task.cancel()

    async def _stop(self, helpers: list[asyncio.Task[Any]]) -> None:
        """Ends every task and gives back every lease that is still held."""
        running = dict(self._running)
        self._running.clear()
        for task in (*helpers, *running):
            task.cancel()
        outcomes = await asyncio.gather(*helpers, return_exceptions=True)
        ends = await asyncio.gather(*running, return_exceptions=True)
        held = [lease for lease, end in zip(running.values(), ends, strict=True) if isinstance(end, BaseException)]
        held += [lease for outcome in outcomes if isinstance(outcome, list) for lease in outcome]
        for lease in held:
            try:
                await self._sink.release(lease)
            except LeaseLost:
                continue  # finished, released or handed on while it was being stopped


class _FirstAttempts:
    """Watches the first attempts of a step: when all of them fail, so would the rest."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._version = -1
        self._attempts = 0
        self._errors = 0

    def finished(self, lease: Lease, error: Exception | None) -> None:
        """Counts one attempt. Raises the error when it is the last of `count` that all failed."""
        if lease.min_version > self._version:  # the learner went on: another step is being collected
            self._version, self._attempts, self._errors = lease.min_version, 0, 0
        self._attempts += 1
        self._errors += error is not None
        if error is not None and self._errors == self._attempts == self._count:
            raise error
