"""What stands between the network and the service: who may call, and how many bytes may stand in memory."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import ClientDisconnect, Request

from miles.buffer.api import MSGPACK, RECORD

OPEN_ROUTES = ("/livez",)
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
BODY_S = 120.0


class Refused(Exception):
    """A request that is answered with a status and one sentence, and nothing else is done with it."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class Doorkeeper:
    """Lets in who shows one of the tokens; without tokens only requests that name this machine as their host.

    A page in a browser can send requests to services of its machine, under a name that it made point here; so names count.
    """

    def __init__(self, tokens: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    def check(self, request: Request) -> None:
        """Raises Refused. The time it takes does not depend on how much of a token is right."""
        if request.url.path in OPEN_ROUTES:
            return
        if not self._digests:
            name = request.headers.get("host", "").rpartition(":")[0] or request.headers.get("host", "")
            if name not in LOOPBACK_NAMES:
                raise Refused(421, "this service has no token and answers to its loopback address alone")
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        shown = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        found = [hmac.compare_digest(shown, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(found):
            raise Refused(401, "a bearer token is needed: set MILES_BUFFER_TOKEN or buffer.token_file")


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
