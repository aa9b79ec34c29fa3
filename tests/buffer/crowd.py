"""Clients of a buffer that train a run together: collectors in threads, zombies among them, and a learner."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from miles.buffer.client import RemoteSink, RemoteSource
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.errors import BufferClosed, LeaseLost
from miles.types import Group, Lease

TTL_S = 1.0


@dataclass
class Crowd:
    """`clients` collectors on the address; one of four of each one's leases is slept over, and then brought all the same."""

    address: Address
    stream: PromptStream
    make: Callable[[int, int, int], Group]  # ordinal, row, version
    clients: int
    zombies: bool = True
    fenced: int = 0  # groups that came too late
    errors: list[BaseException] = field(default_factory=list)

    def start(self) -> None:
        self._threads = [threading.Thread(target=self._collect, args=(index,)) for index in range(self.clients)]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join()
        self.check()

    def check(self) -> None:
        """Raises what has ended a collector."""
        if self.errors:
            raise self.errors[0]

    def _collect(self, index: int) -> None:
        try:
            asyncio.run(self._run(index))
        except BaseException as error:
            self.errors.append(error)

    async def _run(self, index: int) -> None:
        sink, draw = RemoteSink(self.address), random.Random(index)
        try:
            while leases := await sink.lease(2, f"client-{index}", TTL_S):
                await asyncio.gather(*(self._finish(sink, lease, draw.random()) for lease in leases))
        finally:
            await sink.close()

    async def _finish(self, sink: RemoteSink, lease: Lease, fate: float) -> None:
        group = self.make(lease.ordinal, self.stream.at(lease.ordinal).row, lease.min_version)
        if self.zombies and fate < 0.05:
            await asyncio.sleep(TTL_S * 1.5)
        try:
            if 0.05 <= fate < 0.1:
                await sink.release(lease)
            else:
                await sink.put(lease, group)
                await sink.put(lease, group)
        except LeaseLost:
            self.fenced += 1


def learn(
    source: RemoteSource, look: Callable[[], object], start: int = 0,
    after_step: Callable[[int], None] = lambda version: None,
) -> list[list[Group]]:  # fmt: skip
    """Train to the end of the stream: the groups of each step from `start` on. `look` is called while it waits, and may raise."""
    seen: list[list[Group]] = []
    while True:
        try:
            groups = source.take_now(start + len(seen), wait=1.0)
        except BufferClosed:
            return seen
        if groups is None:
            look()
            continue
        seen.append(groups)
        source.advance(start + len(seen))
        after_step(start + len(seen))
