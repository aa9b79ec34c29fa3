"""The buffer on another machine, or in another process: the sink and source protocols over HTTP."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2
import msgspec

from miles.buffer import api
from miles.buffer.payloads import Payloads, Place
from miles.buffer.reading import Stats
from miles.buffer.record import record_of
from miles.buffer.rewinding import RewindMode
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address, AsyncCaller, Caller, content, raise_for
from miles.buffer.wire import decode_group, encode_group
from miles.errors import ExperienceError
from miles.types import Collected, FinishedGroup, Group, Lease

T = TypeVar("T")
INLINE_BYTES = LedgerSettings(1).inline_bytes


class RemoteSink:
    """`ExperienceSink`: what a collector needs. One for each collector; all of its calls run in one event loop."""

    def __init__(
        self, address: Address, vocabulary: int | None = None, *, wait: bool = True, payloads: Payloads | None = None
    ) -> None:
        """`wait`: `lease` waits while credit is used up, and gives nothing only when the run is over. `vocabulary`: token ids
        are below it. `payloads`: the service's object store, where large groups go without passing through the service."""
        self._caller = AsyncCaller(address)
        self._vocabulary = vocabulary
        self._payloads = payloads
        self._run = address.run
        self._wait = api.MAX_WAIT_S if wait else 0.0
        self._session = uuid.uuid4().hex
        self._number = 0

    async def lease(self, n: int, worker: str, ttl: float) -> list[Lease]:
        """Up to n ordinals; none when no more will come, or, where it does not wait, while none can be had.

        One call at a time: a call that is cut off and one that is made again have the same number.
        """
        while True:
            call = api.LeaseCall(n, worker, ttl, self._session, self._number, self._wait)
            response = await self._caller.call("POST", "/lease", **content(call))
            if response.status_code == 410:
                return []
            if response.status_code == 429 and self._wait:
                continue
            if response.status_code == 429:
                return []
            leases = _answer(response, list[Lease])
            self._number += 1
            return leases

    async def renew(self, leases: Sequence[Lease]) -> list[Lease]:
        """The leases that are still held, with a new expiry."""
        return _answer(await self._caller.call("POST", "/renew", **content(api.Leases(list(leases)))), list[Lease])

    async def put(self, lease: Lease, group: Group) -> None:
        """Store a finished group, durably; waits while the buffer's disk is full. Raises LeaseLost and GroupRefused."""
        frame = encode_group(group, self._vocabulary)
        body, headers = frame.payload, {"content-type": api.MSGPACK, api.DIGEST: frame.digest}
        if self._payloads is not None and len(frame.payload) >= INLINE_BYTES:
            name = f"{self._run}/{group.ordinal}-{frame.digest}"
            place = await asyncio.to_thread(self._payloads.append, frame.payload, name)
            body = msgspec.msgpack.encode(record_of(group, frame, place.object))
            headers["content-type"] = api.RECORD
        response = await self._caller.call(
            "PUT", f"/groups/{lease.ordinal}", params={"lease": lease.lease_id}, content=body, headers=headers
        )
        raise_for(response)

    async def drop(self, lease: Lease, reason: str, group: Group | None = None) -> None:
        """Give up on an ordinal for good. `reason`: a name, or `name: what happened`."""
        frame = None if group is None else encode_group(group, self._vocabulary)
        call = api.Drop(lease, reason) if frame is None else api.Drop(lease, reason, frame.digest, frame.payload)
        raise_for(await self._caller.call("POST", "/drop", **content(call)))

    async def release(self, lease: Lease) -> None:
        """Give an ordinal back, to be leased again."""
        raise_for(await self._caller.call("POST", "/release", **content(api.Leases([lease]))))

    async def begin(self, worker: str) -> int:
        """Give back what an earlier process of this worker's name holds; the number of leases."""
        return _answer(await self._caller.call("POST", "/worker", **content(api.Worker(worker))), dict[str, int])[
            "released"
        ]

    async def close(self) -> None:
        await self._caller.close()


class RemoteSource:
    """`ExperienceSource`: what the learner needs. One learner holds a run; `rewind` takes it over."""

    def __init__(self, address: Address, vocabulary: int | None = None, *, payloads: Payloads | None = None) -> None:
        """`payloads`: the service's object store, where large groups are read without passing through the service."""
        self._payloads = payloads
        self.address = address
        self._caller = Caller(address)
        self._vocabulary = vocabulary
        self._session = uuid.uuid4().hex
        self._number = 0

    def register(
        self, settings: LedgerSettings, stream: PromptStream, identity: Mapping[str, Any], *, resume: bool
    ) -> bool:
        """Make the run, or with `resume` go on with the one that is there; True where it was made.

        Raises RunDirError where there is another run of this name, or one and `resume` is False.
        """
        call = api.Registration(dict(identity), settings, stream.arguments(), resume, uuid.uuid4().hex)
        return self._answered("POST", "", dict[str, bool], **content(call))["created"]

    def exists(self) -> bool:
        """Whether the service holds the run."""
        response = self._caller.call("GET", "")
        if response.status_code == 404:
            return False
        raise_for(response)
        return True

    def identity(self) -> dict[str, Any]:
        """What the learner has registered the run with."""
        return self._answered("GET", "", dict[str, Any])["identity"]

    def restore(self, snapshot: Path) -> None:
        """Make a run that the service has lost again, from a checkpoint; rewind it with "resample" afterwards."""
        raise_for(
            self._caller.call("POST", "/restore", content=snapshot.read_bytes(), headers={"content-type": api.MSGPACK})
        )

    def take(self, version: int) -> list[Group]:
        """The groups of the step's manifest; waits until it is full.

        Raises BufferClosed after the end of the stream, NothingToTrain, PoisonedData, and LearnerFenced where another
        learner has taken the run over.
        """
        while (groups := self.take_now(version, wait=api.MAX_WAIT_S)) is None:
            pass
        return groups

    def take_now(self, version: int, wait: float = 0.0) -> list[Group] | None:
        """As `take`; None where the manifest is not full within `wait` seconds."""
        response = self._caller.call("POST", f"/steps/{version}", **content(api.LearnerCall(self._session, wait)))
        if response.status_code == 204:
            return None
        entries = _answer(response, api.Step).groups
        groups: list[Group] = []
        while len(groups) < len(entries):
            groups += self._page(version, entries, len(groups))
        return groups

    def _page(self, version: int, entries: Sequence[tuple[int, str]], start: int) -> list[Group]:
        params: dict[str, Any] = {"start": start, **({} if self._payloads is None else {"direct": 1})}
        page = self._answered("GET", f"/steps/{version}/groups", list[api.Stored], params=params)
        expected = entries[start : start + len(page)]
        if not page or [(each.ordinal, each.digest) for each in page] != list(expected):
            raise ExperienceError(f"the buffer gave other groups for step {version} than its manifest names")
        return [self._read(each) for each in page]

    def _read(self, stored: api.Stored) -> Group:
        payload = stored.payload
        if payload is None:
            assert self._payloads is not None
            payload = self._payloads.read(Place(object=stored.object), stored.length)
        return decode_group(payload, stored.digest, self._vocabulary)

    def finished(self, version: int) -> list[FinishedGroup]:
        """Summaries of every group that finished for this step, in ordinal order, dropped ones too."""
        return self._answered("GET", f"/steps/{version}/finished", list[FinishedGroup])

    def collected(self, version: int) -> list[Collected]:
        """Who collected the step's groups and when, by the buffer's clock, in ordinal order, dropped ones too."""
        return self._answered("GET", f"/steps/{version}/collected", list[Collected])

    def group(self, ordinal: int) -> Group:
        """One finished group; of a dropped one where its samples were kept. Raises ExperienceError."""
        response = self._caller.call("GET", f"/groups/{ordinal}")
        raise_for(response)
        return decode_group(response.content, response.headers[api.DIGEST], self._vocabulary)

    def short(self, version: int) -> str | None:
        """Why the manifest of `version` holds fewer groups than a step asks for; None where it is full."""
        call = content(api.LearnerCall(self._session))
        return self._answered("POST", f"/steps/{version}", api.Step, **call).short

    def stats(self) -> Stats:
        """Where the run's groups are."""
        return self._answered("GET", "/stats", Stats)

    def snapshot(self) -> bytes:
        """The ledger without its groups: a checkpoint's part of the buffer."""
        response = self._caller.call("GET", "/snapshot")
        raise_for(response)
        return response.content

    def advance(self, version: int) -> None:
        """The learner holds `version` now."""
        raise_for(self._caller.call("POST", "/version", **content(api.Version(version, self._session))))

    def commit(self, version: int, checkpoint: Path) -> None:
        """`checkpoint` at `version` is the oldest one kept: what lies below it may be deleted."""
        raise_for(self._caller.call("POST", "/commit", **content(api.Commit(version, checkpoint.name, self._session))))

    def rewind(self, version: int, mode: RewindMode = "replay") -> None:
        """The learner starts again from `version`; any other learner of this run is fenced off from now on."""
        self._number += 1
        raise_for(
            self._caller.call("POST", "/rewind", **content(api.Rewind(version, mode, self._session, self._number)))
        )

    def end(self, reason: str) -> None:
        """Nothing more is leased: collectors end. A rewind opens the run again."""
        raise_for(self._caller.call("POST", "/end", **content(api.End(reason, self._session))))

    def close(self) -> None:
        self._caller.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _answered(self, method: str, path: str, kind: type[T], **request: Any) -> T:
        return _answer(self._caller.call(method, path, **request), kind)


class InlineRemote(RemoteSource):
    """A source over HTTP for a learner that also collects: `take` runs its collector until the manifest is full."""

    def __init__(
        self, address: Address, *, collect: Callable[[], None], vocabulary: int | None = None,
        payloads: Payloads | None = None,
    ) -> None:  # fmt: skip
        """`collect` runs a collector on a sink that does not wait, until there is nothing to lease."""
        super().__init__(address, vocabulary, payloads=payloads)
        self._collect = collect

    def take(self, version: int) -> list[Group]:
        """As `RemoteSource.take`. Where collecting has nothing to do, others of the run are waited for."""
        wait = 0.0
        while (groups := self.take_now(version, wait)) is None:
            self._collect()
            wait = 1.0
        return groups


def _answer(response: httpx2.Response, kind: type[T]) -> T:
    """The body of an answer. Raises the error that a refusal stands for, and ExperienceError for what is no answer."""
    raise_for(response)
    try:
        return msgspec.msgpack.decode(response.content, type=kind)
    except msgspec.MsgspecError as error:
        raise ExperienceError(f"the answer of {response.url.host} cannot be read: {error}") from error
