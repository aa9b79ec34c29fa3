"""The buffer as a service: ledgers of any number of runs behind HTTP. Every call is idempotent; nothing is unpickled."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from miles.buffer import api
from miles.buffer.callers import Call
from miles.buffer.gauges import Meters, exposition
from miles.buffer.guard import Bodies, check_head, header, pieces
from miles.buffer.leases import checked_name
from miles.buffer.record import Record, record_of
from miles.buffer.runs import Run, Runs
from miles.buffer.wire import Frame, decode_group
from miles.errors import GroupRefused, LedgerLost, MilesError
from miles.types import Lease
from miles.web.door import Doorkeeper, Refused

T = TypeVar("T")
M = TypeVar("M", bound=msgspec.Struct)
THREADS = 32
RECHECK_S = 1.0
RECHECK_SHARED_S = 0.05
Handler = Callable[["Service", Request], Awaitable[Response]]


@dataclass
class Service:
    """The routes, and what they share."""

    runs: Runs
    door: Doorkeeper
    bodies: Bodies
    meters: Meters = field(default_factory=Meters)
    max_group_bytes: int = api.MAX_GROUP_BYTES

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "miles-buffer")
        self._closing = asyncio.Event()

    def app(self) -> Starlette:
        """The ASGI application."""
        run = "/v1/runs/{run}"
        routes = [
            ("GET", "/livez", livez), ("GET", "/metrics", metrics), ("POST", run, register), ("GET", run, describe),
            ("POST", f"{run}/lease", lease), ("POST", f"{run}/renew", renew), ("PUT", f"{run}/groups/{{ordinal:int}}", put),
            ("GET", f"{run}/groups/{{ordinal:int}}", group), ("POST", f"{run}/release", release),
            ("POST", f"{run}/worker", worker),
            ("POST", f"{run}/drop", drop), ("POST", f"{run}/steps/{{step:int}}", take),
            ("GET", f"{run}/steps/{{step:int}}/groups", step_groups), ("GET", f"{run}/steps/{{step:int}}/finished", finished),
            ("GET", f"{run}/steps/{{step:int}}/collected", collected),
            ("POST", f"{run}/commit", commit), ("POST", f"{run}/rewind", rewind), ("POST", f"{run}/version", version),
            ("POST", f"{run}/end", end), ("GET", f"{run}/stats", stats), ("GET", f"{run}/snapshot", snapshot),
            ("POST", f"{run}/restore", restore),
        ]  # fmt: skip
        return Starlette(
            routes=[Route(path, self._endpoint(handler), methods=[method]) for method, path, handler in routes],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._threads.shutdown()
            self.runs.close()

    def close(self) -> None:
        """Those who wait are told that nothing has come, so that the service can end."""
        self._closing.set()
        for run in self.runs.opened():
            run.changes.tell()

    def _endpoint(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            response = await self._answer(handler, request)
            self.meters.answered(handler.__name__, response.status_code)
            return response

        return endpoint

    async def _answer(self, handler: Handler, request: Request) -> Response:
        """What a handler answers, or the refusal that its error stands for."""
        try:
            self.door.check(request)
            return await handler(self, request)
        except Refused as refused:
            headers = {"connection": "close"}  # what is left of the body is not read
            if refused.retry_after is not None:
                headers["retry-after"] = str(refused.retry_after)
            return reply(api.Problem("Refused", str(refused)), refused.status, headers)
        except OverflowError:
            return reply(api.Problem("Refused", "a number is larger than any that the ledger can hold"), 400)
        except MilesError as error:
            status, problem = api.problem_of(error)
            if isinstance(error, LedgerLost) and (name := request.path_params.get("run")):
                await self._forget(name)
            return reply(problem, status, {"retry-after": "1"} if status == 507 else None)

    async def _forget(self, name: str) -> None:
        for run in self.runs.opened():
            if run.name == name:
                await self.thread(self.runs.lose, run)

    async def thread(self, work: Callable[..., T], *values: Any) -> T:
        """Run something that waits for the disk."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *values)

    async def run(self, request: Request) -> Run:
        name = request.path_params["run"]
        return await self.thread(self.runs.get, name)

    async def message(self, request: Request, kind: type[M], limit: int = api.MAX_CALL_BYTES) -> M:
        """The body as a message. Raises Refused."""
        async with self.bodies.read(request, limit) as body:
            return parsed(body, kind)

    async def until(self, run: Run, seconds: float, look: Callable[[], T | None]) -> T | None:
        """What `look` finds, again after each change of the run, for at most so many seconds."""
        deadline = time.monotonic() + min(max(seconds, 0.0), api.MAX_WAIT_S)
        recheck = RECHECK_SHARED_S if run.ledger.shared else RECHECK_S
        while True:
            seen = run.changes.count
            found = await self.thread(look)
            left = deadline - time.monotonic()
            if found is not None or left <= 0 or self._closing.is_set():
                return found
            await run.changes.wait(seen, min(left, recheck))


def reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.msgpack.encode(content), status, headers, media_type=api.MSGPACK)


def parsed(body: bytes, kind: type[M]) -> M:
    """Raises Refused for anything that is not exactly such a message."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no {kind.__name__}: {error}") from None


async def livez(service: Service, request: Request) -> Response:
    return PlainTextResponse("ok\n")


async def metrics(service: Service, request: Request) -> Response:
    runs = service.runs.opened()
    gauges = {run.name: await service.thread(run.ledger.gauges) for run in runs}
    return PlainTextResponse(exposition(service.meters, gauges, service.bodies.in_use))


async def register(service: Service, request: Request) -> Response:
    registration = await service.message(request, api.Registration)
    run, created = await service.thread(service.runs.register, request.path_params["run"], registration)
    run.changes.tell()
    return reply({"created": created}, 201 if created else 200)


async def describe(service: Service, request: Request) -> Response:
    run = await service.run(request)
    identity = await service.thread(run.ledger.identity)
    return reply({"identity": identity, "settings": run.ledger.settings, "stream": run.ledger.stream.arguments()})


async def lease(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.LeaseCall)
    if not (0 < call.n <= api.MAX_LEASES and 0 < call.ttl <= api.MAX_TTL_S and call.number >= 0):
        raise Refused(400, f"n must be in [1, {api.MAX_LEASES}], ttl in (0, {api.MAX_TTL_S:g}], number not negative")
    checked_name(call.session, "the session")

    def look() -> list[Lease] | bool | None:
        leases = run.ledger.lease(call.n, call.worker, call.ttl, Call(call.session, call.number))
        return leases or (run.ledger.is_over() or None)

    found = await service.until(run, call.wait, look)
    if found is None:
        return reply([], 429, {"retry-after": "1"})
    return reply([], 410) if found is True else reply(found)


async def renew(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.Leases)
    return reply(await service.thread(run.ledger.renew, call.leases))


async def put(service: Service, request: Request) -> Response:
    run = await service.run(request)
    held = Lease(request.path_params["ordinal"], request.query_params.get("lease", ""), 0.0, 0)
    async with service.bodies.read(request, service.max_group_bytes) as body:
        service.meters.received(len(body))
        new = await service.thread(_put, service, run, held, body, request)
    run.changes.tell()
    return reply({"new": new}, 201 if new else 200)


def _put(service: Service, run: Run, held: Lease, body: bytes, request: Request) -> bool:
    if request.headers["content-type"] == api.RECORD:
        return run.ledger.put_stored(held, parsed_record(body))
    digest = header(request, api.DIGEST)
    try:
        group = decode_group(body, digest, run.ledger.settings.vocabulary, service.max_group_bytes)
    except GroupRefused as refused:
        run.ledger.quarantine(held, refused, body)
        raise
    return run.ledger.put_record(held, record_of(group, Frame(body, digest)))


def parsed_record(body: bytes) -> Record:
    try:
        return msgspec.msgpack.decode(body, type=Record)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise Refused(400, f"the body is no record of a group: {error}") from None


async def group(service: Service, request: Request) -> Response:
    run = await service.run(request)
    frame = await service.thread(run.ledger.frame, request.path_params["ordinal"])
    return Response(frame.payload, headers={api.DIGEST: frame.digest}, media_type=api.MSGPACK)


async def release(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.Leases)
    for each in call.leases:
        await service.thread(run.ledger.release, each)
    run.changes.tell()
    return reply(None)


async def worker(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.Worker)
    released = await service.thread(run.ledger.release_worker, call.worker)
    run.changes.tell()
    return reply({"released": released})


async def drop(service: Service, request: Request) -> Response:
    run = await service.run(request)
    async with service.bodies.read(request, service.max_group_bytes) as body:
        await service.thread(_drop, service, run, parsed(body, api.Drop))
    run.changes.tell()
    return reply(None)


def _drop(service: Service, run: Run, call: api.Drop) -> None:
    record = None
    if call.group is not None:
        digest = call.digest or ""
        group = decode_group(call.group, digest, run.ledger.settings.vocabulary, service.max_group_bytes)
        record = record_of(group, Frame(call.group, digest))
    run.ledger.drop_record(call.lease, call.reason, record)


async def take(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.LearnerCall)
    step = request.path_params["step"]
    found = await service.until(run, call.wait, lambda: run.ledger.create(step, call.session) or None)
    if found is None:
        return Response(status_code=204)
    run.changes.tell()
    entries = await service.thread(run.ledger.entries, step)
    return reply(api.Step(entries, await service.thread(run.ledger.short, step)))


async def step_groups(service: Service, request: Request) -> Response:
    """A manifest's groups from place `start` on, as many as fit into one answer; with `direct` large ones as objects' names."""
    run, direct = await service.run(request), "direct" in request.query_params
    start = request.query_params.get("start", "0")
    if not (start.isascii() and start.isdecimal() and len(start) < 10):
        raise Refused(400, "start must be a number")

    def read() -> list[api.Stored]:
        page: list[api.Stored] = []
        size = 0
        for ordinal, digest in run.ledger.entries(request.path_params["step"])[int(start) :]:
            each = _stored(run, ordinal, digest, direct)
            size += len(each.payload or b"")
            if page and size > api.MAX_PAGE_BYTES:
                break
            page.append(each)
        return page

    return reply(await service.thread(read))


async def collected(service: Service, request: Request) -> Response:
    run = await service.run(request)
    return reply(await service.thread(run.ledger.collected, request.path_params["step"]))


def _stored(run: Run, ordinal: int, digest: str, direct: bool) -> api.Stored:
    if direct:
        frame, name, _, length = run.ledger.located(ordinal)
        if frame is None:
            return api.Stored(ordinal, digest, length, object=name)
    payload = run.ledger.frame(ordinal).payload
    return api.Stored(ordinal, digest, len(payload), payload)


async def finished(service: Service, request: Request) -> Response:
    run = await service.run(request)
    return reply(await service.thread(run.ledger.finished, request.path_params["step"]))


async def commit(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.Commit)
    await service.thread(run.ledger.commit, call.version, call.checkpoint[:200], call.session)
    return reply(None)


async def rewind(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.Rewind)
    await service.thread(run.ledger.rewind, call.version, call.mode, Call(call.session, call.number))
    run.changes.tell()
    return reply(None)


async def version(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.Version)
    await service.thread(run.ledger.advance, call.version, call.session)
    run.changes.tell()
    return reply(None)


async def end(service: Service, request: Request) -> Response:
    run, call = await service.run(request), await service.message(request, api.End)
    await service.thread(run.ledger.end, call.reason[:200], call.session)
    run.changes.tell()
    return reply(None)


async def stats(service: Service, request: Request) -> Response:
    run = await service.run(request)
    return reply(await service.thread(run.ledger.stats))


async def snapshot(service: Service, request: Request) -> Response:
    run = await service.run(request)
    path = service.runs.incoming()

    def write() -> None:
        with path.open("wb") as file:
            file.writelines(run.ledger.snapshot())

    async def content() -> AsyncIterator[bytes]:
        try:
            with path.open("rb") as file:
                while piece := await service.thread(file.read, 1 << 20):
                    yield piece
        finally:
            path.unlink(missing_ok=True)

    try:
        await service.thread(write)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return StreamingResponse(content(), media_type=api.MSGPACK, headers={"content-length": str(path.stat().st_size)})


async def restore(service: Service, request: Request) -> Response:
    """The body goes to a file as it comes, so that its size costs no memory."""
    length = check_head(request, api.MAX_SNAPSHOT_BYTES)
    path: Path = service.runs.incoming()
    try:
        with path.open("wb") as file:
            async for piece in pieces(request, length):
                await service.thread(file.write, piece)
        await service.thread(service.runs.restore, request.path_params["run"], path)
    finally:
        with suppress(OSError):
            path.unlink()
    return reply(None, 201)
