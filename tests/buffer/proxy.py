"""A network that misbehaves: loses replies after the request had its effect, repeats requests, delays and reorders them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

LOST, REPEATED, LATE = 0.2, 0.2, 0.2


@dataclass
class Faults:
    """What has been done to the requests."""

    requests: int = 0
    lost: int = 0
    repeated: int = 0
    late: int = 0


@dataclass
class Proxy:
    """Forwards HTTP/1.1 requests with a length, each over a connection of its own."""

    host: str
    port: int
    seed: int = 0
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._tasks: set[asyncio.Task[object]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while (answer := await self._misbehave(await _message(reader))) is not None:
                    writer.write(answer)
                    await writer.drain()
        finally:
            writer.close()

    async def _misbehave(self, request: bytes) -> bytes | None:
        """The answer; None where it is lost on the way back."""
        self.faults.requests += 1
        draw = self._draw.random
        if draw() < LATE:  # behind requests that came later
            self.faults.late += 1
            await asyncio.sleep(draw() * 0.1)
        if draw() < REPEATED:  # a copy that comes at any time, also long after the answer
            self.faults.repeated += 1
            task = asyncio.ensure_future(self._copy(request, draw() * 0.5))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        answer = await self._forward(request)
        if draw() < LOST:
            self.faults.lost += 1
            return None
        return answer

    async def _copy(self, request: bytes, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._forward(request)

    async def _forward(self, request: bytes) -> bytes | None:
        """The service's answer; None where there is none, because it is being started again."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return None
        try:
            writer.write(request)
            await writer.drain()
            return await _message(reader)
        except (OSError, asyncio.IncompleteReadError):
            return None
        finally:
            writer.close()


async def _message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return head + (await reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b"")


@contextmanager
def misbehaving(url: str, seed: int = 0) -> Iterator[tuple[str, Faults]]:
    """The address of a proxy before `url`, and what it has done."""
    host, port = url.removeprefix("http://").split(":")
    proxy, begun, loops = Proxy(host, int(port), seed), threading.Event(), []
    addresses: list[int] = []

    async def run() -> None:
        server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0, limit=1 << 26)
        stop = asyncio.Event()
        loops.append((asyncio.get_running_loop(), stop))
        addresses.append(server.sockets[0].getsockname()[1])
        begun.set()
        await stop.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0)  # what was closed is gone after one turn of the loop

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    begun.wait()
    try:
        yield f"http://127.0.0.1:{addresses[0]}", proxy.faults
    finally:
        loop, stop = loops[0]
        loop.call_soon_threadsafe(stop.set)
        thread.join()
