"""Where a service listens: its address and what must be true of it, its tokens, its socket, and uvicorn's settings."""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from miles.errors import BadInput

SHORTEST_TOKEN = 16
MOST_CONNECTIONS = 1024
HEADER_BYTES = 16 << 10
SIGTERM_CODE, SIGINT_CODE = 143, 130


@dataclass(frozen=True)
class Place:
    """Where to listen, and what for. `secret`: the environment variable that holds the token."""

    listen: str  # HOST:PORT; port 0: any free one
    secret: str
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False  # another address than loopback without TLS


def read_tokens(file: Path | None, environment: Mapping[str, str], variable: str) -> list[str]:
    """The tokens, one a line of a file, or the one of the environment. Raises BadInput; no message holds a token."""
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"the token file {file} cannot be read: {error}") from error
        source = f"the token file {file}"
    else:
        lines = [environment[variable]] if environment.get(variable) else []
        source = variable
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


def check_place(place: Place, tokens: Sequence[str]) -> tuple[str, int]:
    """Host and port. Raises BadInput for what must not be started."""
    host, port = parse_listen(place.listen)
    if (place.tls_cert is None) != (place.tls_key is None):
        raise BadInput("--tls-cert and --tls-key belong together: give both, or neither")
    for path in (place.tls_cert, place.tls_key):
        if path is not None and not path.is_file():
            raise BadInput(f"{path} does not exist: give the PEM file of the certificate, or of its key")
    if not is_loopback(host):
        if not tokens:
            raise BadInput(
                f"--listen {place.listen} is open to other machines, and there is no token: set {place.secret} or give "
                "--token-file, or listen on 127.0.0.1"
            )
        if place.tls_cert is None and not place.insecure:
            raise BadInput(
                f"--listen {place.listen} is open to other machines, and without TLS whoever sees the network sees token and "
                "data: give --tls-cert and --tls-key, or --insecure where the network is your own"
            )
    return host, port


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """The socket, which is bound before anything is promised. Raises BadInput."""
    with ExitStack() as stack:
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = stack.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(MOST_CONNECTIONS)  # who comes before the service has begun waits
        except OSError as error:
            raise BadInput(f"--listen {host}:{port} cannot be used: {error}; choose another port or address") from error
        yield listener


class _Server(uvicorn.Server):
    """uvicorn's, whose signals are ours."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, tls_cert: Path | None, tls_key: Path | None) -> uvicorn.Server:
    """What runs an ASGI application: `server.serve(sockets=[...])`, until `server.should_exit`."""
    config = uvicorn.Config(
        app, http="h11", ws="none", log_level="warning", access_log=False, server_header=False, lifespan="on",
        h11_max_incomplete_event_size=HEADER_BYTES, limit_concurrency=MOST_CONNECTIONS, backlog=MOST_CONNECTIONS,
        timeout_keep_alive=75, timeout_graceful_shutdown=5, ssl_certfile=tls_cert, ssl_keyfile=tls_key,
    )  # fmt: skip
    return _Server(config)


async def serve_until_signal(
    server: uvicorn.Server, listener: socket.socket, stop: Callable[[], object] = lambda: None
) -> int:
    """Serve until SIGTERM or SIGINT, whose exit code it returns; 0 where somebody else ended it. `stop`: called first then."""
    code = 0

    def end(number: int) -> None:
        nonlocal code
        code = SIGTERM_CODE if number == signal.SIGTERM else SIGINT_CODE
        stop()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    await server.serve(sockets=[listener])
    return code


def url_of(address: tuple[Any, ...], tls: bool) -> str:
    """How others reach a bound socket; one that is bound to every address by this machine's name."""
    host, port = address[0], address[1]
    if ipaddress.ip_address(host).is_unspecified:
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"{'https' if tls else 'http'}://{shown}:{port}"
