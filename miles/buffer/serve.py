"""`miles buffer`: starts the service, says how to join it, and ends on a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from miles.buffer.backend import ON_THIS_MACHINE, SQLITE, Where
from miles.buffer.guard import Bodies, Doorkeeper
from miles.buffer.place import refuse_network_file_system
from miles.buffer.runs import Runs
from miles.buffer.server import Service
from miles.errors import BadInput

TOKEN_VARIABLE = "MILES_BUFFER_TOKEN"
SHORTEST_TOKEN = 16
MOST_CONNECTIONS = 1024
HEADER_BYTES = 16 << 10
BODY_BUDGET = 1 << 30
SIGTERM_CODE, SIGINT_CODE = 143, 130


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


def read_tokens(file: Path | None, environment: Mapping[str, str]) -> list[str]:
    """The tokens, one a line of a file, or the one of the environment. Raises BadInput; no message holds a token."""
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"the token file {file} cannot be read: {error}") from error
        source = f"the token file {file}"
    else:
        lines = [environment[TOKEN_VARIABLE]] if environment.get(TOKEN_VARIABLE) else []
        source = TOKEN_VARIABLE
    tokens = [line.strip() for line in lines if line.strip()]
    if file is not None and not tokens:
        raise BadInput(f"{source} holds no token: write one into it, such as the output of `openssl rand -hex 32`")
    if any(len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() for token in tokens):
        raise BadInput(
            f"a token of {source} is shorter than {SHORTEST_TOKEN} characters or not plain ASCII: take the output of "
            "`openssl rand -hex 32`"
        )
    return tokens


def parse_listen(listen: str) -> tuple[str, int]:
    """HOST:PORT. Raises BadInput."""
    host, _, port = listen.rpartition(":")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise BadInput(f"--listen {listen}: give HOST:PORT, such as 127.0.0.1:7070; port 0 takes a free one")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check(options: Options, tokens: Sequence[str]) -> tuple[str, int]:
    """Where to listen. Raises BadInput for what must not be started."""
    host, port = parse_listen(options.listen)
    if (options.tls_cert is None) != (options.tls_key is None):
        raise BadInput("--tls-cert and --tls-key belong together: give both, or neither")
    for path in (options.tls_cert, options.tls_key):
        if path is not None and not path.is_file():
            raise BadInput(f"{path} does not exist: give the PEM file of the certificate, or of its key")
    if not is_loopback(host):
        if not tokens:
            raise BadInput(
                f"--listen {options.listen} is open to other machines, and there is no token: set {TOKEN_VARIABLE} or give "
                "--token-file, or listen on 127.0.0.1"
            )
        if options.tls_cert is None and not options.insecure:
            raise BadInput(
                f"--listen {options.listen} is open to other machines, and without TLS whoever sees the network sees token and "
                "data: give --tls-cert and --tls-key, or --insecure where the network is your own"
            )
    return host, port


def serve(options: Options, environment: Mapping[str, str] = os.environ, say: Callable[[str], object] = print) -> int:
    """Serve until a signal; the exit code. Raises BadInput, RunDirError and ExperienceError before it begins."""
    tokens = read_tokens(options.token_file, environment)
    host, port = check(options, tokens)
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.where.ledger == SQLITE:
        refuse_network_file_system(options.folder)
    for left in options.folder.glob(".incoming-*"):
        left.unlink()
    with listening(host, port) as listener:
        return asyncio.run(_serve(options, tokens, listener, say))


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """The socket, which is bound before anything is promised. Raises BadInput."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(MOST_CONNECTIONS)  # who comes before the service has begun waits
    except OSError as error:
        raise BadInput(f"--listen {host}:{port} cannot be used: {error}; choose another port or address") from error
    with listener:
        yield listener


class _Server(uvicorn.Server):
    """uvicorn's, whose signals are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(options: Options, tokens: Sequence[str]) -> tuple[Service, uvicorn.Server]:
    """The service and what runs it: `server.serve(sockets=[...])`, until `server.should_exit`."""
    runs = Runs(options.folder, options.where, single=options.single)
    service = Service(runs, Doorkeeper(tokens), Bodies(options.body_budget))
    config = uvicorn.Config(
        service.app(), http="h11", ws="none", log_level="warning", access_log=False, server_header=False, lifespan="on",
        h11_max_incomplete_event_size=HEADER_BYTES, limit_concurrency=MOST_CONNECTIONS, backlog=MOST_CONNECTIONS,
        timeout_keep_alive=75, timeout_graceful_shutdown=5, ssl_certfile=options.tls_cert, ssl_keyfile=options.tls_key,
    )  # fmt: skip
    return service, _Server(config)


async def _serve(options: Options, tokens: Sequence[str], listener: socket.socket, say: Callable[[str], object]) -> int:
    service, server = make_server(options, tokens)
    code = 0

    def stop(number: int) -> None:
        nonlocal code
        code = SIGTERM_CODE if number == signal.SIGTERM else SIGINT_CODE
        service.close()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    for line in how_to_join(options, listener.getsockname(), bool(tokens)):
        say(line)
    await server.serve(sockets=[listener])
    return code


def how_to_join(options: Options, address: tuple[str, int], token: bool) -> list[str]:
    """What to tell who starts the service."""
    host, port = address[0], address[1]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    url = f"{'http' if options.tls_cert is None else 'https'}://{shown}:{port}"
    lines = [f"buffer: {url} (runs in {options.folder})", f"join it: --buffer.url {url} --buffer.run NAME"]
    if token:
        lines.append(f"  with the token in {TOKEN_VARIABLE}, or --buffer.token_file FILE")
    if options.tls_cert is not None:
        lines.append("  with --buffer.ca_file FILE where no public authority has signed the certificate")
    return lines
