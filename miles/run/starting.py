"""How the process of one role is started and watched, here on this machine. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from miles.run.lifeline import LIFELINE
from miles.run.processes import GRACE_S, TAIL, keep_lines, said_at_end


@dataclass(frozen=True)
class Role:
    """One process of a run: a command, and what its environment says beside that of the launcher."""

    name: str  # of its log file too
    command: Sequence[str]
    environ: Mapping[str, str] = field(default_factory=dict)
    shown: bool = False  # its output is for the terminal, only its errors are kept


@dataclass(frozen=True)
class Ended:
    """How the process of a role ended: its exit code, negative for a signal, and its last lines."""

    role: Role
    code: int
    lines: tuple[str, ...] = ()

    @property
    def said(self) -> str | None:
        """The paragraph that its command ended with, where it did."""
        return said_at_end(self.lines)


class Handle(Protocol):
    """A process that runs, here or elsewhere."""

    def signal(self, signum: int) -> None: ...

    def kill(self) -> None:
        """End it, and what it has started, at once."""
        ...


class Starter(Protocol):
    """Starts processes, of this machine or of a cluster; they end when whoever has started them is gone."""

    def start(self, role: Role, ended: Callable[[Ended], None]) -> Handle:
        """`ended` is called once, from a thread, when the process and all that it wrote have come to an end."""
        ...


class LocalStarter:
    """Processes of this machine, with a pipe that ends them when this process is gone. Their lines go to `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._reader, self._writer = os.pipe()

    def start(self, role: Role, ended: Callable[[Ended], None]) -> Handle:
        process = subprocess.Popen(
            role.command, env={**os.environ, **role.environ, "PYTHONUNBUFFERED": "1", LIFELINE: str(self._reader)},
            stdin=subprocess.DEVNULL, stdout=None if role.shown else subprocess.PIPE,
            stderr=subprocess.PIPE if role.shown else subprocess.STDOUT, pass_fds=(self._reader,), start_new_session=True,
        )  # fmt: skip
        log = self._logs / f"{role.name}.log"
        threading.Thread(target=_watch, args=(role, process, log, ended), daemon=True).start()
        return LocalProcess(process)

    def close(self) -> None:
        """Whatever runs still is ended by this."""
        os.close(self._reader)
        os.close(self._writer)


class LocalProcess:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def _watch(role: Role, process: subprocess.Popen[bytes], log: Path, ended: Callable[[Ended], None]) -> None:
    """Wait for the end of a process, then of what it had started, which may hold its output open."""
    lines: deque[str] = deque(maxlen=TAIL)
    stream = process.stderr if role.shown else process.stdout
    assert stream is not None
    reading = threading.Thread(target=keep_lines, args=(stream, lines, log), daemon=True)
    reading.start()
    code = process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    reading.join(GRACE_S)
    ended(Ended(role, code, tuple(lines)))
