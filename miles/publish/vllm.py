"""Brings a new version to every vLLM server: makes it ready, loads it, compares it with the learner, and lets it serve."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from miles.errors import EngineError, ServerFault
from miles.publish.canary import Expected, Tolerance, compare
from miles.publish.carriers import Carrier
from miles.publish.files import Published
from miles.types import PolicyUpdate

log = logging.getLogger(__name__)


class Server(Protocol):
    """What a publisher knows of a server."""

    name: str
    url: str
    version: int


class Servers(Protocol):
    """The servers of a run (`engine/fleet.py`)."""

    servers: Sequence[Any]

    def serve(self, server: Any, version: int) -> None: ...
    def hold(self, server: Any, reason: str) -> None: ...
    def expect(self, server: Any, reason: str) -> None: ...
    def lost(self, server: Any, reason: str) -> None: ...
    def in_use(self, server: Any) -> set[int]: ...


class Routes(Protocol):
    """Routes of one server (`engine/vllm_routes.py`)."""

    def version(self) -> str: ...
    def name_version(self, version: str) -> None: ...
    def unload_adapter(self, version: int) -> None: ...
    def adapters(self) -> list[int]: ...
    def logprobs(self, ids: Sequence[int], adapter_version: int | None = None) -> list[float]: ...
    def close(self) -> None: ...


class VllmPublisher:
    """Publishes by version; satisfies `miles.protocols.Publisher`.

    A server takes part as it can: one that fails does not stop the others, and is tried again at the next version or when
    `refresh` is called for it. It serves a version only after its log-probabilities of the canary agreed with the learner's
    at exactly that version. A publish that is repeated, after whatever went wrong, ends in the same state.
    """

    def __init__(
        self,
        servers: Servers,
        carrier: Carrier,
        connect: Callable[[str], Routes],
        *,
        max_staleness: int = 0,
        verify: bool = True,
        tolerance: Tolerance,
    ) -> None:
        """`connect(url)`: the routes of one server. `max_staleness`: versions behind the newest that stay loaded."""
        self._servers, self._carrier, self._connect = servers, carrier, connect
        self._max_staleness, self._verify, self._tolerance = max_staleness, verify, tolerance
        self._newest: Published | None = None
        self._canary: Expected | None = None
        self._one_at_a_time = threading.Lock()
        self.worst_difference: float | None = None  # nat, of the newest canary over all servers that agreed

    def publish(self, update: PolicyUpdate) -> None:
        """Make the version ready and bring it to all servers. Raises EngineError where none of them serves it, or is coming back."""
        published = self._carrier.write(update)
        with self._one_at_a_time:
            self._newest, self._canary, self.worst_difference = published, None, None
            servers = self._servers.servers
            with ThreadPoolExecutor(len(servers), "miles-publish") as pool:
                if self._verify and update.canary is not None:
                    self._canary = Expected(update.canary.ids)
                coming = [pool.submit(self._bring, server) for server in servers]
                if self._canary is not None and update.canary is not None:
                    self._canary.score(update.canary.logprobs)  # while servers load
                reached = [future.result() for future in coming]
            if not any(reached) and not any(server.coming for server in servers):
                reasons = "; ".join(f"{server.name}: {server.reason}" for server in servers)
                raise EngineError(f"version {update.version} could be published to no server: {reasons}")
            self._carrier.forget(self._still_needed())

    def refresh(self, server: Any) -> bool:
        """Bring the newest version to a server that joins or came back. Whether it serves it now."""
        with self._one_at_a_time:
            return self._newest is not None and self._bring(server)

    def _bring(self, server: Any) -> bool:
        published = self._newest
        assert published is not None
        if published.adapter is None:
            # Full weights change under every request: new ones wait until they are confirmed.
            self._servers.expect(server, f"it is taking version {published.version}")
        routes = self._connect(server.url)
        try:
            self._carrier.load(routes, published)
            self._confirm(routes, published)
            self._unload(routes, published, self._servers.in_use(server))
        except ServerFault as fault:
            log.warning("version %d did not reach %s: %s", published.version, server.name, fault)
            (self._servers.lost if fault.gone else self._servers.hold)(server, str(fault))
            return False
        finally:
            routes.close()
        self._servers.serve(server, published.version)
        return True

    def _confirm(self, routes: Routes, published: Published) -> None:
        """Raise ServerFault where the server does not compute what the learner computes."""
        name = published.version if published.adapter is not None else None
        if self._canary is not None:
            difference = compare(routes.logprobs(self._canary.ids, name), self._canary.logprobs(), self._tolerance)
            self.worst_difference = max(difference, self.worst_difference or 0.0)
        if name is None:
            routes.name_version(str(published.version))
            if (found := routes.version()) != str(published.version):
                raise ServerFault(f"it calls its weights {found!r} after version {published.version} was published")

    def _unload(self, routes: Routes, published: Published, in_use: Collection[int]) -> None:
        if published.adapter is None:
            return
        for version in routes.adapters():
            if version < published.version - self._max_staleness and version not in in_use:
                routes.unload_adapter(version)

    def _still_needed(self) -> set[int]:
        """Versions whose files a server may read again."""
        assert self._newest is not None
        newest = self._newest.version
        kept = range(newest - self._max_staleness, newest + 1)
        return {*kept, *(version for server in self._servers.servers for version in self._servers.in_use(server))}
