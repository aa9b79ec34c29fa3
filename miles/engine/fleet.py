"""The servers of a run: which of them may serve, how much each has under way, and which one the next request goes to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from miles.engine.vllm_routes import Progress
from miles.errors import EngineError

IMBALANCE = 0.25  # of a server's places: more than that, and a request leaves the server that knows its prompt
WAITING = 0.25  # of a server's places: requests that may wait there, so that a place never stays empty


@dataclass(eq=False)
class Server:
    """One server. `version` is the newest whose weights were verified there; it serves while it is `ready`."""

    name: str
    url: str
    places: int  # samples that it decodes at the same time
    ready: bool = False
    coming: bool = False  # it is being started or refreshed: worth waiting for
    version: int = -1
    reason: str = "it has not been given weights yet"  # why it is not ready
    limit: int = 0  # requests under way at most; follows what the server can take
    using: Counter[int] = field(default_factory=Counter)  # requests under way by version
    failures: int = 0  # since the run began; tells an old failure from a new one

    def __post_init__(self) -> None:
        self.limit = self.places + max(1, int(WAITING * self.places))

    @property
    def load(self) -> int:
        return self.using.total()

    def adapt(self, progress: Progress) -> None:
        """Let more requests in while none waits at the server, and fewer while many do."""
        if progress.waiting > 2 * WAITING * self.places + 2:
            self.limit = max(self.places, int(0.8 * self.limit))
        elif progress.waiting == 0 and self.load >= self.limit:
            self.limit = min(8 * self.places, int(1.25 * self.limit) + 1)


class Fleet:
    """Hands requests to servers. The event loop's side waits; publisher and keeper call from threads of their own.

    A request prefers the server that has seen its prompt, unless that one has clearly more to do than another.
    """

    def __init__(self, servers: Sequence[Server], start_timeout_s: float = 600.0) -> None:
        self.servers = tuple(servers)
        self.on_failure: Callable[[Server], None] = lambda server: None  # set by whoever can bring servers back
        self._timeout = start_timeout_s
        self._lock = threading.RLock()
        self._waiters: list[asyncio.Future[None]] = []

    async def acquire(self, ids: Sequence[int], min_version: int) -> tuple[Server, int]:
        """A place on a server, and its version; to be given back with `release`.

        Waits for a place, and for servers that are on their way. Raises EngineError where none is left, or where all serve
        older weights than `min_version`.
        """
        deadline = time.monotonic() + self._timeout
        while True:
            with self._lock:
                server = self._choose(ids, min_version)
                if server is not None:
                    server.using[server.version] += 1
                    return server, server.version
                self._check_hope(min_version, deadline)
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                patience = None if self._serving(min_version) else max(0.0, deadline - time.monotonic())
            with contextlib.suppress(TimeoutError):  # _check_hope says what is missing then
                await asyncio.wait_for(waiter, patience)

    async def confirmed(self, server: Server, version: int) -> bool:
        """Whether the server's weights of `version` were verified; waits for the verdict."""
        while server.coming:
            with self._lock:
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
            await waiter
        return server.ready and server.version >= version

    def release(self, server: Server, version: int) -> None:
        with self._lock:
            server.using[version] -= 1
            if not server.using[version]:
                del server.using[version]
        self.changed()

    def serve(self, server: Server, version: int) -> None:
        """The server has these weights, verified: it may serve."""
        with self._lock:
            server.ready, server.coming, server.version, server.reason = True, False, version, ""
        self.changed()

    def hold(self, server: Server, reason: str) -> None:
        """No request goes to the server until `serve` is called for it again."""
        with self._lock:
            server.ready, server.coming, server.reason = False, False, reason
        self.changed()

    def expect(self, server: Server, reason: str) -> None:
        """As `hold`, but it is being brought back."""
        with self._lock:
            server.ready, server.coming, server.reason = False, True, reason
        self.changed()

    def fail(self, server: Server, reason: str, *, gone: bool) -> None:
        """The server failed a request. `gone`: it may come back and must then be given the newest weights."""
        with self._lock:
            if not server.ready:
                return
            server.failures += 1
        if gone:
            self.lost(server, reason)
        else:
            self.hold(server, reason)

    def lost(self, server: Server, reason: str) -> None:
        """The server cannot be reached, or has other weights than it should: whoever can brings it back."""
        with self._lock:
            self.hold(server, reason)
            self.on_failure(server)

    def in_use(self, server: Server) -> set[int]:
        """Versions that requests under way were sent to."""
        with self._lock:
            return set(server.using)

    def changed(self) -> None:
        """Wake everything that waits for a place or a server."""
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            loop = waiter.get_loop()
            if not loop.is_closed():
                loop.call_soon_threadsafe(_wake, waiter)

    def _choose(self, ids: Sequence[int], min_version: int) -> Server | None:
        fit = [s for s in self.servers if s.ready and s.version >= min_version and s.load < s.limit]
        if not fit:
            return None
        least = min(fit, key=lambda server: server.load)
        known = self.servers[zlib.crc32(array("q", ids).tobytes()) % len(self.servers)]
        near = known in fit and known.load - least.load <= IMBALANCE * known.places
        return known if near else least

    def _serving(self, min_version: int) -> bool:
        return any(server.ready and server.version >= min_version for server in self.servers)

    def _check_hope(self, min_version: int, deadline: float) -> None:
        if self._serving(min_version):
            return
        if any(server.coming for server in self.servers) and time.monotonic() < deadline:
            return
        ready = [server.version for server in self.servers if server.ready]
        if ready:
            raise EngineError(
                f"tokens of version {min_version} or newer are asked for, but the weights are {max(ready)}"
            )
        raise EngineError(f"no server is left to sample from: {self.reasons()}")

    def reasons(self) -> str:
        """Why each server that does not serve does not."""
        return "; ".join(f"{server.name}: {server.reason}" for server in self.servers if not server.ready)


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
