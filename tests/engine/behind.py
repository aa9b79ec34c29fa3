"""A port in a thread of this process, before servers on unix sockets; and a stand-in for vLLM that tells what reached it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from miles.engine.port import Port, ServerFacts, ServiceFacts
from miles.web.door import Doorkeeper
from miles.web.listen import listening, make_server

MARK = ".mark-of-the-test"


class _Quiet(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextmanager
def running(server: uvicorn.Server, **sockets: Any) -> Iterator[None]:
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(**sockets)))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join()


class StandIn:
    """Answers every route with 200 and `answer`; `requests`: (method, path, query, body) of all that came."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.requests: list[tuple[str, str, str, bytes]] = []
        self.pieces: list[bytes] = []  # of bodies, as they come
        self.answer: bytes = b'{"fine": true}'
        self.breaks = self.waits = (
            False  # break the connection in the middle of the answer; answer only to who is patient
        )
        self.left = threading.Event()  # somebody went away before the answer

    async def _respond(self, request: Request) -> Response:
        body = b""
        try:
            async for piece in request.stream():
                self.pieces.append(piece)
                body += piece
            self.requests.append((request.method, request.url.path, request.url.query, body))
            while self.waits:
                if await request.is_disconnected():
                    self.left.set()
                    break
                await asyncio.sleep(0.01)
        except ClientDisconnect:
            self.left.set()
        if self.breaks:
            return StreamingResponse(self._half(), headers={"content-length": str(len(self.answer))})
        return Response(self.answer, media_type="application/json")

    async def _half(self) -> Any:
        yield self.answer[: len(self.answer) // 2]
        await asyncio.sleep(0.05)
        raise ConnectionError("the stand-in dies")

    @contextmanager
    def serving(self) -> Iterator[None]:
        app = Starlette(routes=[Route("/{path:path}", self._respond, methods=["GET", "POST", "PUT", "DELETE"])])
        config = uvicorn.Config(app, uds=str(self.socket), log_level="critical", lifespan="off", ws="none")
        with running(_Quiet(config)):
            yield


def facts_of(folder: Path, *servers: str, **keys: Any) -> ServiceFacts:
    """Facts of servers for the tiny Llama of the tests."""
    (folder / MARK).touch()
    fixed = {
        "model": "tiny", "digest": "d", "dtype": "fp32", "context": 512, "places": 64,
        "logprobs_mode": "processed_logprobs", "vllm": "0.32.0", **keys,
    }  # fmt: skip
    return ServiceFacts([ServerFacts(name, **fixed) for name in servers], str(folder), MARK)


@contextmanager
def port(
    sockets: Mapping[str, str],
    folder: Path,
    tokens: Sequence[str] = (),
    take: Callable[[str, bytes], Path] | None = None,
    **keys: Any,
) -> Iterator[str]:
    """The address of a port before the servers `name -> unix:/path`, which read weights below `folder`."""

    def facts(run: str) -> ServiceFacts:
        return facts_of(folder, *sockets, **keys)

    served = Port(sockets, Doorkeeper(tokens, "give one"), folder, facts, take or (lambda run, offer: folder / run))
    with ExitStack() as stack:
        listener = stack.enter_context(listening("127.0.0.1", 0))
        stack.enter_context(running(make_server(served.app(), None, None), sockets=[listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
