"""`miles buffer`: starts the service, says how to join it, and ends on a signal."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from miles.buffer.backend import ON_THIS_MACHINE, SQLITE, Where
from miles.buffer.guard import Bodies
from miles.buffer.place import refuse_network_file_system
from miles.buffer.runs import Runs
from miles.buffer.server import Service
from miles.web import listen as web
from miles.web.door import Doorkeeper
from miles.web.listen import Place, check_place, listening, read_tokens, url_of

TOKEN_VARIABLE = "MILES_BUFFER_TOKEN"
BODY_BUDGET = 1 << 30


@dataclass(frozen=True)
class Options:
    """What `miles buffer` is told."""

    folder: Path
    listen: str = "127.0.0.1:0"  # HOST:PORT; port 0: any free one
    token_file: Path | None = None  # one token a line. None: MILES_BUFFER_TOKEN, where it is set
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False  # another address than loopback without TLS
    where: Where = ON_THIS_MACHINE
    body_budget: int = BODY_BUDGET  # bytes of bodies in memory at a time
    single: bool = False  # the folder is that of one run: its ledger stands in it, and not one level below


def check(options: Options, tokens: Sequence[str]) -> tuple[str, int]:
    """Where to listen. Raises BadInput for what must not be started."""
    place = Place(options.listen, TOKEN_VARIABLE, options.tls_cert, options.tls_key, options.insecure)
    return check_place(place, tokens)


def serve(options: Options, environment: Mapping[str, str] = os.environ, say: Callable[[str], object] = print) -> int:
    """Serve until a signal; the exit code. Raises BadInput, RunDirError and ExperienceError before it begins."""
    tokens = read_tokens(options.token_file, environment, TOKEN_VARIABLE)
    host, port = check(options, tokens)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.where.ledger == SQLITE:
        refuse_network_file_system(options.folder)
    for left in options.folder.glob(".incoming-*"):
        left.unlink()
    with listening(host, port) as listener:
        return asyncio.run(_serve(options, tokens, listener, say))


def make_server(options: Options, tokens: Sequence[str]) -> tuple[Service, uvicorn.Server]:
    """The service and what runs it: `server.serve(sockets=[...])`, until `server.should_exit`."""
    runs = Runs(options.folder, options.where, single=options.single)
    service = Service(
        runs, Doorkeeper(tokens, f"set {TOKEN_VARIABLE} or buffer.token_file"), Bodies(options.body_budget)
    )
    return service, web.make_server(service.app(), options.tls_cert, options.tls_key)


async def _serve(options: Options, tokens: Sequence[str], listener: socket.socket, say: Callable[[str], object]) -> int:
    service, server = make_server(options, tokens)
    for line in how_to_join(options, listener.getsockname(), bool(tokens)):
        say(line)
    return await web.serve_until_signal(server, listener, service.close)


def how_to_join(options: Options, address: tuple[Any, ...], token: bool) -> list[str]:
    """What to tell who starts the service."""
    url = url_of(address, options.tls_cert is not None)
    lines = [f"buffer: {url} (runs in {options.folder})", f"join it: --buffer.url {url} --buffer.run NAME"]
    if token:
        lines.append(f"  with the token in {TOKEN_VARIABLE}, or --buffer.token_file FILE")
    if options.tls_cert is not None:
        lines.append("  with --buffer.ca_file FILE where no public authority has signed the certificate")
    return lines
