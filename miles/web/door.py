"""Who may call a service: whoever shows a token, or, without tokens, this machine alone."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request

OPEN_ROUTES = ("/livez",)
LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")


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

    def __init__(self, tokens: Sequence[str], way_out: str) -> None:
        """`way_out`: how a caller gives a token."""
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
        self._way_out = way_out

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
            raise Refused(401, f"a bearer token is needed: {self._way_out}")
