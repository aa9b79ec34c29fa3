"""`miles serve`: keeps the vLLM servers of a recipe behind a port, for one run after the other."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.config.schema import Recipe
from miles.engine.joining import TOKEN_VARIABLE
from miles.engine.port import Port, ServerFacts, ServiceFacts
from miles.engine.vllm_flags import find_python
from miles.engine.vllm_routes import ServerRoutes
from miles.engine.vllm_server import VllmServer, check_installed
from miles.errors import ConfigError, EngineError
from miles.learn.load import load_config, load_tokenizer
from miles.publish.fetch import Fetcher, FetchError, Offer
from miles.run.logs import said
from miles.run.recipes import inspect
from miles.run.rundir import default_run_dir
from miles.run.servers import (
    RUN_FOLDER,
    Found,
    Servers,
    adapter_slots,
    model_digest,
    own_servers,
    serving_dtype,
    wait_ready,
)
from miles.web.door import Doorkeeper, Refused
from miles.web.listen import Place, check_place, listening, make_server, read_tokens, serve_until_signal, url_of

log = logging.getLogger(__name__)

RESTARTS = 5  # of each server


@dataclass(frozen=True)
class Options:
    """What `miles serve` is told beside the recipe."""

    listen: str = "127.0.0.1:7080"  # HOST:PORT; port 0: any free one
    token_file: Path | None = None  # one token a line. None: MILES_ENGINE_TOKEN, where it is set
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False  # another address than loopback without TLS


def serve_command(
    recipes: Sequence[Path], overrides: Mapping[str, Any], options: Options,
    environ: Mapping[str, str] = os.environ, say: Callable[[str], object] = print,
) -> int:  # fmt: skip
    """Serve until a signal; the exit code. Raises BadInput before a server is started, EngineError where one cannot be."""
    recipe = inspect(recipes, overrides, environ).recipe
    check_recipe(recipe)
    tokens = read_tokens(options.token_file, environ, TOKEN_VARIABLE)
    host, port = check_place(
        Place(options.listen, TOKEN_VARIABLE, options.tls_cert, options.tls_key, options.insecure), tokens
    )
    check_installed(find_python(recipe.engine.python))
    folder = default_run_dir(f"serve-{recipes[0].stem}")
    with ExitStack() as stack:
        stack.enter_context(said(say))
        listener = stack.enter_context(listening(host, port))
        folder.mkdir(parents=True)
        servers = stack.enter_context(own_servers(recipe, load_tokenizer(recipe.model), folder))
        say(f"{recipe.model.name}: starting {len(servers.found)} vLLM server{'s' * (len(servers.found) > 1)} ...")
        wait_ready(servers, recipe.engine.start_timeout_s)
        facts = stack.enter_context(_Desk(recipe, servers).open())
        stack.enter_context(kept_alive(servers, recipe.engine.start_timeout_s))
        return asyncio.run(_serve(options, tokens, listener, servers, facts, say))


def check_recipe(recipe: Recipe) -> None:
    """Raises ConfigError for a recipe that has no servers to keep."""
    if recipe.engine.kind == "inprocess":
        raise ConfigError(
            f'engine.kind = "{recipe.engine.kind}" samples inside of the learner: `miles serve` keeps vLLM servers; give a recipe '
            'with engine.kind = "vllm", or --engine.kind vllm'
        )
    if recipe.engine.url:
        raise ConfigError(
            f"engine.url = {', '.join(recipe.engine.url)} names servers that run already: leave it out of what `miles serve` starts"
        )


async def _serve(
    options: Options, tokens: Sequence[str], listener: socket.socket, servers: Servers,
    facts: Callable[[str], ServiceFacts], say: Callable[[str], object],
) -> int:  # fmt: skip
    door = Doorkeeper(tokens, f"set {TOKEN_VARIABLE} or engine.token_file")
    taker = Taker(servers.root)
    port = Port({server.name: server.url for server in servers.found}, door, servers.root, facts, taker.take)
    server = make_server(port.app(), options.tls_cert, options.tls_key)
    for line in how_to_join(options, listener.getsockname(), servers, bool(tokens)):
        say(line)
    return await serve_until_signal(server, listener)


def how_to_join(options: Options, address: tuple[Any, ...], servers: Servers, token: bool) -> list[str]:
    """What to tell who starts the service."""
    url = url_of(address, options.tls_cert is not None)
    lines = [
        f"engine: {url} ({len(servers.found)} vLLM server{'s' * (len(servers.found) > 1)}, new weights in {servers.root})",
        f"join it: miles train RECIPE --engine.kind vllm --engine.url {url}",
    ]
    if token:
        lines.append(f"  with the token in {TOKEN_VARIABLE}, or --engine.token_file FILE")
    if options.tls_cert is not None:
        lines.append("  with --engine.ca_file FILE where no public authority has signed the certificate")
    return lines


class _Desk:
    """Tells runs that join what the servers are, and clears away what the run before has written."""

    def __init__(self, recipe: Recipe, servers: Servers) -> None:
        self._recipe, self._servers = recipe, servers
        self._mark = f".miles-service-{secrets.token_hex(8)}"

    @contextmanager
    def open(self) -> Iterator[Callable[[str], ServiceFacts]]:
        root = self._servers.root
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = root / self._mark
        mark.touch()
        version = check_installed(find_python(self._recipe.engine.python))
        facts = ServiceFacts(
            [self._facts(server, version) for server in self._servers.found], str(root), self._mark
        )  # before the port opens: nobody waits for it

        def joined(run: str) -> ServiceFacts:
            self._clear(run)
            return facts

        try:
            yield joined
        finally:
            mark.unlink(missing_ok=True)

    def _facts(self, server: Found, version: str) -> ServerFacts:
        with ServerRoutes(server.url) as routes:
            settings = routes.settings()
        slots = adapter_slots(self._recipe)
        return ServerFacts(
            name=server.name, model=self._recipe.model.name, digest=model_digest(load_config(self._recipe.model)),
            dtype=serving_dtype(self._recipe), context=settings["max_model_len"], places=settings["max_num_seqs"],
            logprobs_mode=settings["logprobs_mode"], vllm=version, slots=settings["max_loras"],
            slot_rank=settings["max_lora_rank"], targets=[] if slots is None else list(slots.targets),
        )  # fmt: skip

    def _clear(self, run: str) -> None:
        for folder in self._servers.root.glob(RUN_FOLDER.format(run="*")):
            if folder.name != RUN_FOLDER.format(run=run):
                shutil.rmtree(folder, ignore_errors=True)


class Taker:
    """Takes versions off the shelves of runs on other machines, each into the folder of its run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._fetchers: dict[str, Fetcher] = {}

    def take(self, run: str, body: bytes) -> Path:
        """Where the version lies, whole. Raises Refused."""
        try:
            offer = Offer.parse(json.loads(body))
        except (ValueError, RecursionError, FetchError) as error:
            raise Refused(400, f"the body is no offer of a version: {error}") from None
        fetcher = self._fetchers.setdefault(run, Fetcher(self._root / RUN_FOLDER.format(run=run)))
        try:
            return fetcher.fetch(offer)
        except FetchError as error:
            raise Refused(424, str(error)) from error


@contextmanager
def kept_alive(servers: Servers, timeout_s: float) -> Iterator[None]:
    """Start a server again when it has ended; runs that have joined give it their weights before they use it."""
    ending = threading.Event()
    own = [server.own for server in servers.found if server.own is not None]
    threads = [
        threading.Thread(target=_keep, args=(server, ending, timeout_s), name=f"keep-{server.name}") for server in own
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for server in own:
            server.stop()
        for thread in threads:
            thread.join()


def _keep(server: VllmServer, ending: threading.Event, timeout_s: float) -> None:
    for left in range(RESTARTS, -1, -1):
        code = server.wait_end()
        if ending.is_set():
            return
        log.warning("%s ended with code %s and is started again (%d more times at most)", server.name, code, left)
        try:
            server.stop()
            server.start()
            server.wait_ready(timeout_s, ending.is_set)
        except EngineError as error:
            log.warning("%s does not come back: %s", server.name, error)
            return
