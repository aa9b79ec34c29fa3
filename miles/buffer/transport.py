"""How a client calls the service: who it is, and when a call is made again."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import msgspec

from miles.buffer import api
from miles.buffer.leases import checked_name
from miles.errors import BadInput, ExperienceError, MilesError

log = logging.getLogger(__name__)

PATIENCE_S = 600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
TIMEOUT = httpx2.Timeout(60.0, connect=5.0, read=api.MAX_WAIT_S + 30.0)
PASSING = (408, 502, 503, 504)


@dataclass(frozen=True)
class Address:
    """Where a run is served, and what is shown there. The token is in no repr, log or message."""

    url: str  # http://host:port; of several buffers that serve one ledger, separated by commas, any one is as good
    run: str
    token: str | None = None
    ca_file: Path | None = None  # certificates to trust. None: those of the system
    patience: float = PATIENCE_S  # seconds that a call is made again while the service cannot be reached

    def __post_init__(self) -> None:
        for url in self.urls:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.username:
                raise BadInput(f"buffer.url {url!r} must look like http://HOST:PORT or https://HOST:PORT")
        checked_name(self.run, "buffer.run")

    def __repr__(self) -> str:
        return f"Address({self.url!r}, {self.run!r})"

    @property
    def urls(self) -> list[str]:
        return [url.strip().rstrip("/") for url in self.url.split(",")]

    def at(self, path: str, turn: int) -> str:
        """The whole address of a call; each turn goes to the next of several buffers."""
        return f"{self.urls[turn % len(self.urls)]}/{api.VERSION}/runs/{self.run}{path}"

    def arguments(self) -> dict[str, Any]:
        """For httpx2's clients. Proxies of the environment are not asked: the address is meant as it stands."""
        headers = {"accept": api.MSGPACK}
        if self.token is not None:
            headers["authorization"] = f"Bearer {self.token}"
        verify: ssl.SSLContext | bool = True
        if self.ca_file is not None:
            try:
                verify = ssl.create_default_context(cafile=str(self.ca_file))
            except OSError as error:
                raise BadInput(f"buffer.ca_file {self.ca_file} cannot be used: {error}") from error
        limits = httpx2.Limits(max_keepalive_connections=64, keepalive_expiry=60.0)
        return {
            "headers": headers, "verify": verify, "timeout": TIMEOUT, "limits": limits, "trust_env": False,
        }  # fmt: skip


class Attempts:
    """Decides after each attempt at one call whether, and when, to make it again."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._began = time.monotonic()
        self._pause = FIRST_PAUSE_S
        self._told = False

    def pause(self, outcome: httpx2.Response | httpx2.TransportError) -> float | None:
        """Seconds to wait before the next attempt; None: the outcome is an answer. Raises ExperienceError in the end."""
        if isinstance(outcome, httpx2.Response) and outcome.status_code not in (*PASSING, 507):
            return None
        said = f"{type(outcome).__name__} {outcome}" if isinstance(outcome, httpx2.TransportError) else _said(outcome)
        full = isinstance(outcome, httpx2.Response) and outcome.status_code == 507
        waited = time.monotonic() - self._began
        if waited > self._address.patience and not full:
            raise ExperienceError(
                f"the buffer at {self._address.url} cannot be reached since {waited:.0f} s ({said}): start it again, or give "
                "its address in buffer.url"
            )
        if not self._told and (full or waited > 5.0):
            self._told = True
            log.warning("waiting for the buffer at %s: %s", self._address.url, said)
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_PAUSE_S)
        # Not all clients at once, and without touching the random state that training depends on.
        return pause * random.SystemRandom().uniform(0.5, 1.0)


def _said(response: httpx2.Response) -> str:
    try:
        return msgspec.msgpack.decode(response.content, type=api.Problem).message
    except msgspec.MsgspecError:
        return f"status {response.status_code}"


def raise_for(response: httpx2.Response) -> None:
    """Raises the error that a refusal stands for."""
    if response.status_code < 400:
        return
    try:
        problem = msgspec.msgpack.decode(response.content, type=api.Problem)
    except msgspec.MsgspecError:
        problem = api.Problem("ExperienceError", f"status {response.status_code} from {response.url.host}")
    error: MilesError = api.error_of(problem)
    if response.status_code in (401, 421):
        error = BadInput(f"the buffer refuses this client: {problem.message}")
    raise error


def content(message: Any) -> dict[str, Any]:
    """Body and its type, for a request."""
    return {"content": msgspec.msgpack.encode(message), "headers": {"content-type": api.MSGPACK}}


class Caller:
    """Blocking calls."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = httpx2.Client(**address.arguments())
        self._turn = 0

    def call(self, method: str, path: str, **request: Any) -> httpx2.Response:
        """The answer, whatever its status, after as many attempts as it takes. Raises ExperienceError."""
        attempts = Attempts(self._address)
        while True:
            try:
                outcome: httpx2.Response | httpx2.TransportError = self._client.request(
                    method, self._address.at(path, self._turn), **request
                )
            except httpx2.TransportError as error:
                outcome = error
            pause = attempts.pause(outcome)
            if pause is None:
                assert isinstance(outcome, httpx2.Response)
                return outcome
            self._turn += 1
            time.sleep(pause)

    def close(self) -> None:
        self._client.close()


class AsyncCaller:
    """Calls that let others run."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = httpx2.AsyncClient(**address.arguments())
        self._turn = 0

    async def call(self, method: str, path: str, **request: Any) -> httpx2.Response:
        """As `Caller.call`."""
        attempts = Attempts(self._address)
        while True:
            try:
                outcome: httpx2.Response | httpx2.TransportError = await self._client.request(
                    method, self._address.at(path, self._turn), **request
                )
            except httpx2.TransportError as error:
                outcome = error
            pause = attempts.pause(outcome)
            if pause is None:
                assert isinstance(outcome, httpx2.Response)
                return outcome
            self._turn += 1
            await asyncio.sleep(pause)

    async def close(self) -> None:
        await self._client.aclose()
