"""A run's side of `miles serve`: joins a service, sees whether its servers fit, stays, and leaves."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec

from miles.engine.port import ServerFacts, ServiceFacts
from miles.engine.vllm_flags import AdapterSlots
from miles.engine.vllm_routes import Access
from miles.errors import BadInput, ConfigError, EngineError

log = logging.getLogger(__name__)

TOKEN_VARIABLE = "MILES_ENGINE_TOKEN"
AGAIN_S = 2.0  # between two tries to join servers that another run has
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class Needs:
    """What a run must find at a server that it joins."""

    model: str
    digest: str  # of the model's config
    dtype: str
    context: int | None
    adapters: AdapterSlots | None  # None: it publishes full weights


def misfits(facts: ServerFacts, needs: Needs) -> Iterator[str]:
    """One sentence for each thing about the server that the run cannot work with."""
    if facts.digest != needs.digest:
        yield f"it serves {facts.model}, and model.name = {needs.model} has another config: start it with this run's recipe"
    if facts.dtype != needs.dtype:
        yield f"it holds weights in {facts.dtype}, and engine.param_dtype is {needs.dtype} here: make both the same"
    if needs.context is not None and facts.context < needs.context:
        yield (
            f"it reads {facts.context} tokens, and this run may need {needs.context}: set engine.context = {facts.context} here, or "
            "start it with more"
        )
    if facts.logprobs_mode != "processed_logprobs":
        yield f"it gives {facts.logprobs_mode} instead of processed_logprobs: start it with `miles serve`"
    yield from _misfitting_slots(facts, needs.adapters)


def _misfitting_slots(facts: ServerFacts, needed: AdapterSlots | None) -> Iterator[str]:
    if needed is None:
        if facts.slots is not None:
            yield "it takes LoRA adapters, and this run publishes full weights: start it with a recipe without lora.rank"
    elif facts.slots is None or facts.slot_rank is None:
        yield f"it takes full weights, and this run publishes adapters of lora.rank = {needed.rank}: start it with this recipe"
    elif needed.rank > facts.slot_rank or needed.count > facts.slots:
        yield (
            f"it has {facts.slots} slots for adapters of rank {facts.slot_rank}, and this run needs {needed.count} of rank "
            f"{needed.rank} (buffer.max_staleness + 2): start it with this recipe"
        )
    elif missing := sorted(set(needed.targets) - set(facts.targets)):
        yield f"its adapters have no {', '.join(missing)}, which lora.targets names: start it with this recipe"


class Service:
    """One `miles serve`, as a run sees it."""

    def __init__(self, url: str, access: Access) -> None:
        self.url, self._access = url.rstrip("/"), access

    def join(self, patience_s: float) -> ServiceFacts:
        """Have the servers to oneself, waiting for another run to leave. Raises BadInput and EngineError."""
        deadline, told = time.monotonic() + patience_s, False
        while (answer := self._post("/join", {"run": self._access.run})).status_code == 409:
            if time.monotonic() > deadline:
                raise EngineError(f"engine.url {self.url}: {_told(answer)}; end that run, or start another service")
            if not told:
                log.warning("waiting for %s: %s", self.url, _told(answer))
            told = True
            time.sleep(AGAIN_S)
        return self._facts(answer)

    def stay(self) -> None:
        """A sign of life. A service that was started anew is joined again. Raises EngineError where another run has it."""
        if self._post("/stay", {}).status_code == 409:
            self.join(0.0)

    def leave(self) -> None:
        """Give the servers back; where the service cannot be reached it finds out by itself."""
        with contextlib.suppress(EngineError, BadInput):
            self._post("/leave", {})

    def server_url(self, name: str) -> str:
        return f"{self.url}/servers/{name}"

    def _facts(self, answer: httpx2.Response) -> ServiceFacts:
        if answer.status_code == 401:
            raise BadInput(
                f"engine.url {self.url} asks for a token, and the one that was given, if any, is not right: set {TOKEN_VARIABLE} "
                "or engine.token_file"
            )
        try:
            if answer.status_code != 200:
                raise ValueError(_told(answer))
            facts = msgspec.json.decode(answer.content, type=ServiceFacts)
            if not facts.servers or not all(_NAME.fullmatch(server.name) for server in facts.servers):
                raise ValueError("it names no servers")
        except ValueError as error:
            raise BadInput(
                f"engine.url {self.url} answers, but not as `miles serve` does (status {answer.status_code}, {error}): give "
                "the address that `miles serve RECIPE` prints"
            ) from error
        return facts

    def _post(self, path: str, content: Any) -> httpx2.Response:
        try:
            with httpx2.Client(
                headers=self._access.headers, verify=self._access.verify(), timeout=10.0, trust_env=False
            ) as client:
                return client.post(self.url + path, json=content)
        except httpx2.HTTPError as error:
            raise EngineError(
                f"nobody answers at engine.url {self.url} ({type(error).__name__}: {error}): start `miles serve RECIPE` there"
            ) from error


def check_fit(url: str, facts: ServiceFacts, needs: Needs) -> None:
    """Raises ConfigError with everything about the servers that does not fit."""
    problems = [
        f"engine.url {url}, server {server.name}: {problem}."
        for server in facts.servers
        for problem in misfits(server, needs)
    ]
    if problems:
        raise ConfigError(problems)


def shared_folder(url: str, facts: ServiceFacts, wanted: Path | None) -> Path:
    """The folder that the service reads weights from, if this machine has the same one. Raises ConfigError."""
    folder = Path(facts.folder)
    if wanted is not None and wanted.resolve() != folder:
        raise ConfigError(
            f"publish.directory = {wanted} is not the folder {folder} that the service at {url} reads weights from: leave "
            "publish.directory out here, or start the service with the same one"
        )
    if not (folder / Path(facts.mark).name).is_file():
        raise ConfigError(
            f"the service at {url} reads weights from {folder}, and this machine does not share that folder: start it with "
            "--publish.directory DIR, a folder on a disk that both see under the same name"
        )
    return folder


def _told(answer: httpx2.Response) -> str:
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str(answer.json()["error"]["message"])[:300]
    return f"status {answer.status_code}"
