"""What stands between the network and the buffer: how many bytes of bodies may stand in memory, and which are read at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from miles.buffer.api import MSGPACK, RECORD
from miles.web.door import Refused

BODY_S = 120.0


class Bodies:
    """Reads bodies within limits: a length that is said before, never more than it, all bodies together below a budget."""

    def __init__(self, budget: int) -> None:
        self._free = budget
        self._budget = budget
        self._changed = asyncio.Condition()

    @property
    def in_use(self) -> int:
        return self._budget - self._free

    @asynccontextmanager
    async def read(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """The whole body; its bytes count until the block ends. Raises Refused before anything is read or allocated."""
        length = check_head(request, min(limit, self._budget))
        await self._take(length)
        try:
            yield await _whole(request, length)
        finally:
            async with self._changed:
                self._free += length
                self._changed.notify_all()

    async def _take(self, length: int) -> None:
        try:
            async with asyncio.timeout(BODY_S), self._changed:
                await self._changed.wait_for(lambda: self._free >= length)
                self._free -= length
        except TimeoutError:
            raise Refused(503, "too many bytes are under way; try again", retry_after=1) from None


def check_head(request: Request, limit: int) -> int:
    """The length of a body that may be read. Raises Refused."""
    kind = request.headers.get("content-type", "")
    if kind not in (MSGPACK, RECORD):  # a page in a browser cannot send these without asking first
        raise Refused(415, f"the body must be {MSGPACK}")
    said = request.headers.get("content-length", "")
    if not (said.isascii() and said.isdecimal()):
        raise Refused(411, "the length of the body must be said")
    length = int(said[:20])
    if length > limit:
        raise Refused(413, f"the body has {length} bytes, more than the limit of {limit}")
    return length


async def pieces(request: Request, length: int) -> AsyncIterator[bytes]:
    """A body as it comes, exactly `length` bytes of it. Raises Refused."""
    seen = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                seen += len(piece)
                if seen > length:
                    break
                yield piece
    except (TimeoutError, ClientDisconnect):
        raise Refused(408, "the body did not come to its end") from None
    if seen != length:
        raise Refused(400, f"the body has not the {length} bytes that were said")


async def _whole(request: Request, length: int) -> bytes:
    body = bytearray()
    async for piece in pieces(request, length):
        body += piece
    return bytes(body)


def header(request: Request, name: str) -> str:
    """A header that must be there. Raises Refused."""
    value: Any = request.headers.get(name)
    if not value:
        raise Refused(400, f"the header {name} is missing")
    return value
