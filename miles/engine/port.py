"""The port before vLLM servers: checks a token and who has joined, and forwards an allow-list of routes, streamed.

vLLM checks tokens on some of its routes only, and whoever reaches the others can change its weights or run code in it. So a
server listens on a unix socket in a folder of one user, and others reach it through this port.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from miles.engine.port_routes import check_query, checked_body, find
from miles.engine.vllm_routes import RUN_HEADER, async_client, listening
from miles.web.door import Doorkeeper, Refused

MOST_BYTES = 64 << 20  # of a streamed body
MOST_CHECKED_BYTES = 64 << 10  # of a body that is looked at
PIECE_S = 60.0  # in which the next piece of a body must come
SILENT_S = 60.0
"""A run that has joined and says nothing for this many seconds has lost its servers to whoever asks."""
RUN_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class ServerFacts(msgspec.Struct, frozen=True):
    """What one server is, for a run that wants to know whether it fits."""

    name: str
    model: str
    digest: str  # of the model's config
    dtype: str  # fp32 or bf16
    context: int  # tokens of prompt and completion together
    places: int  # samples that it decodes at the same time
    logprobs_mode: str
    vllm: str  # its version
    slots: int | None = None  # adapters that it holds. None: it takes full weights
    slot_rank: int | None = None
    targets: list[str] = []  # layers that an adapter may have


class ServiceFacts(msgspec.Struct, frozen=True):
    """What `join` answers. `folder` is where servers read weights from; the file `mark` in it shows that it is the same one."""

    servers: list[ServerFacts]
    folder: str
    mark: str


class JoinCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    run: str


class Claim:
    """Which run has the servers: one at a time, since each brings weights of its own."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.run: str | None = None
        self._heard = 0.0

    def take(self, run: str) -> None:
        """Raises Refused while another run is heard of."""
        silent = self._clock() - self._heard
        if self.run not in (None, run) and silent < SILENT_S:
            raise Refused(
                409, f"the servers belong to another run, which was heard of {silent:.0f} s ago", retry_after=5
            )
        self.run, self._heard = run, self._clock()

    def check(self, run: str | None) -> None:
        """Raises Refused for a caller that is not the run that has the servers."""
        if run is None or run != self.run:
            raise Refused(409, "the servers belong to another run, or to none: join first")
        self._heard = self._clock()

    def leave(self, run: str | None) -> None:
        self.check(run)
        self.run = None


class Port:
    """The ASGI application. `sockets`: server name -> `unix:/path`; `facts(run)` is asked at each joining.

    `take(run, offer)`: the place below `folder` where the offered version lies then; raises Refused.
    """

    def __init__(
        self,
        sockets: Mapping[str, str],
        door: Doorkeeper,
        folder: Path,
        facts: Callable[[str], ServiceFacts],
        take: Callable[[str, bytes], Path],
    ) -> None:
        self._sockets, self._door, self._folder, self._facts = sockets, door, folder.resolve(), facts
        self._take = take
        self._claim = Claim()
        self._clients: dict[str, httpx2.AsyncClient] = {}

    def app(self) -> Starlette:
        routes = [
            Route("/livez", self._endpoint(self._alive), methods=["GET"]),
            Route("/join", self._endpoint(self._join), methods=["POST"]),
            Route("/leave", self._endpoint(self._leave), methods=["POST"]),
            Route("/stay", self._endpoint(self._stay), methods=["POST"]),
            Route("/servers/{server}/fetch", self._endpoint(self._fetch), methods=["POST"]),
            Route("/servers/{server}/{path:path}", self._endpoint(self._forward), methods=["GET", "POST"]),
        ]
        return Starlette(routes=routes, lifespan=self._lifespan)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._clients = {name: async_client(url) for name, url in self._sockets.items()}
        try:
            yield
        finally:
            for client in self._clients.values():
                await client.aclose()

    def _endpoint(self, handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                self._door.check(request)
                return await handler(request)
            except Refused as refused:
                headers = {"connection": "close"}  # what is left of the body is not read
                if refused.retry_after is not None:
                    headers["retry-after"] = str(refused.retry_after)
                return _json({"error": {"message": str(refused)}}, refused.status, headers)

        return endpoint

    async def _alive(self, request: Request) -> Response:
        return PlainTextResponse("ok")

    async def _join(self, request: Request) -> Response:
        try:
            call = msgspec.json.decode(await _whole(request, MOST_CHECKED_BYTES), type=JoinCall)
        except (msgspec.DecodeError, RecursionError):
            raise Refused(400, "the body must name the run") from None
        if not RUN_NAME.fullmatch(call.run):
            raise Refused(400, "the run's name must be letters, digits, '.', '_' and '-'")
        self._claim.take(call.run)
        return Response(
            msgspec.json.encode(await asyncio.to_thread(self._facts, call.run)), media_type="application/json"
        )

    async def _leave(self, request: Request) -> Response:
        self._claim.leave(request.headers.get(RUN_HEADER))
        return _json({})

    async def _stay(self, request: Request) -> Response:
        self._claim.check(request.headers.get(RUN_HEADER))
        return _json({})

    async def _fetch(self, request: Request) -> Response:
        """Take a version off the shelf of the run that has the servers; they serve meanwhile."""
        run = request.headers.get(RUN_HEADER)
        self._claim.check(run)
        assert run is not None
        body = await _whole(request, MOST_CHECKED_BYTES)
        return _json({"path": str(await asyncio.to_thread(self._take, run, body))})

    async def _forward(self, request: Request) -> Response:
        name = request.path_params["server"]
        client = self._clients.get(name)
        if client is None:
            raise Refused(404, "there is no server of that name")
        # As it was sent: nothing is decoded or put right on the way from the check to the server.
        path = request.scope.get("raw_path", b"").decode("latin-1").partition("?")[0].removeprefix(f"/servers/{name}")
        allowed = find(request.method, path)
        if not allowed.watching:
            self._claim.check(request.headers.get(RUN_HEADER))
        check_query(allowed, request.url.query)
        if not listening(self._sockets[name]):
            raise Refused(502, f"{name} does not run at the moment")
        if allowed.check is None:
            return await _relay(client, request, path, _Streamed(request))
        body = checked_body(allowed.check, await _whole(request, MOST_CHECKED_BYTES), self._folder)
        return await _relay(client, request, path, body)


class _Streamed:
    """The pieces of a body, at most `MOST_BYTES`; `done` is set after the last one."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self.done = asyncio.Event()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for piece in _pieces(self._request, MOST_BYTES):
            yield piece
        self.done.set()


async def _relay(client: httpx2.AsyncClient, request: Request, path: str, body: _Streamed | bytes) -> Response:
    """Send on, and stream the answer back. The server's request ends when the caller goes away."""
    query = f"?{request.url.query}" if request.url.query else ""
    headers = {"content-type": "application/json"} if body else {}
    content = aiter(body) if isinstance(body, _Streamed) else body
    sent = client.build_request(request.method, path + query, headers=headers, content=content)
    sending = asyncio.ensure_future(client.send(sent, stream=True))
    leaving = asyncio.ensure_future(_left(request, body))
    try:
        await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not sending.done():
            raise Refused(408, "the caller went away")
        answer = sending.result()
    except httpx2.HTTPError as error:
        raise Refused(502, f"the server broke the connection: {type(error).__name__}") from error
    except ClientDisconnect:
        raise Refused(408, "the body did not come to its end") from None
    finally:
        for task in (sending, leaving):
            task.cancel()
        await asyncio.gather(sending, leaving, return_exceptions=True)
    kept = {name: answer.headers[name] for name in ("content-type", "content-length") if name in answer.headers}
    return StreamingResponse(_answer(answer), answer.status_code, kept)


async def _answer(answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


async def _left(request: Request, body: _Streamed | bytes) -> None:
    """Returns when the caller has gone; asked only after its body, since both come from one stream of messages."""
    if isinstance(body, _Streamed):
        await body.done.wait()
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _pieces(request: Request, limit: int) -> AsyncIterator[bytes]:
    seen, pieces = 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(PIECE_S):
                piece = await anext(pieces, None)
        except (TimeoutError, ClientDisconnect):
            raise Refused(408, "the body did not come to its end") from None
        if piece is None:
            return
        seen += len(piece)
        if seen > limit:
            raise Refused(413, f"the body has more than {limit} bytes")
        yield piece


async def _whole(request: Request, limit: int) -> bytes:
    body = bytearray()
    async with contextlib.aclosing(_pieces(request, limit)) as pieces:
        async for piece in pieces:
            body += piece
    return bytes(body)


def _json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
