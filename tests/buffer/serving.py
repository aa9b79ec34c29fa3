"""A buffer service in a thread or in a process of its own, and clients of it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from miles.buffer.client import RemoteSource
from miles.buffer.serve import Options, make_server
from miles.buffer.server import Service
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.web.listen import listening

STREAM = PromptStream(100, 0, False, 2)


@contextmanager
def served(folder: Path, tokens: Sequence[str] = (), **options: Any) -> Iterator[tuple[str, Service]]:
    """The service in a thread of this process, with its address."""
    folder.mkdir(exist_ok=True)
    service, server = make_server(Options(folder, **options), tokens)
    loops: list[asyncio.AbstractEventLoop] = []
    begun = threading.Event()

    async def run() -> None:
        loops.append(asyncio.get_running_loop())
        begun.set()
        await server.serve(sockets=[listener])

    with listening("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        begun.wait()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", service
        finally:
            server.should_exit = True
            loops[0].call_soon_threadsafe(service.close)
            thread.join()


class BufferProcess:
    """`miles buffer` in a process of its own, which can be killed and started again on the same port."""

    def __init__(self, folder: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self._options = options
        self._environment = {**os.environ, **(environment or {})}
        self._listen = "127.0.0.1:0"
        self.url = ""
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "miles", "buffer", "--dir", str(self.folder), "--listen", self._listen]
        self.process = subprocess.Popen(
            [*command, *self._options], stdout=subprocess.PIPE, text=True, env=self._environment
        )
        assert self.process.stdout is not None
        found = re.search(r"https?://(\S+)", self.process.stdout.readline())
        assert found is not None, "the service did not start"
        self.url, self._listen = found[0], found[1]

    def kill(self) -> None:
        self.process.kill()
        self._reap()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self._reap()

    def _reap(self) -> int:
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def memory(self) -> int:
        """Bytes of memory of the process, now."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGESIZE")

    def __enter__(self) -> BufferProcess:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.kill()


def registered(
    url: str, run: str = "demo", token: str | None = None, stream: PromptStream = STREAM, patience: float = 20.0,
    **settings: Any,
) -> RemoteSource:  # fmt: skip
    """The learner's side of a new run."""
    source = RemoteSource(Address(url, run, token, patience=patience))
    source.register(LedgerSettings(stream.groups_per_step, **settings), stream, {"config": "c"}, resume=False)
    return source
