"""Starts the ranks of a run as processes of this machine, keeps their logs, and ends all of them when one dies.

Imports no torch: what watches over the ranks takes neither their memory nor their faults.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from miles.run.lifeline import LIFELINE
from miles.run.place import STORE, Machines

GRACE_S = 3.0
"""For ranks to end by themselves after another one has failed; then they are killed."""
STOP_S = 20.0
"""The same after a signal has asked all of them to stop, from the moment when the first one has."""
HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
TAIL = 40
"""Lines of a rank that are kept to be shown when it dies."""


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, negative for a signal, and its last lines."""

    rank: int
    code: int
    lines: tuple[str, ...]
    log: Path

    @property
    def said(self) -> str | None:
        """The paragraph that the command ended with, where it did."""
        return said_at_end(self.lines)


def said_at_end(lines: Sequence[str]) -> str | None:
    """The paragraph that a command ended with, where it did."""
    start = next((i for i in reversed(range(len(lines))) if lines[i].startswith("miles: ")), None)
    return None if start is None else "\n".join(lines[start:]).removeprefix("miles: ")


@dataclass(frozen=True)
class Outcome:
    """How all ranks of this machine ended. `cause`: the one that ended the others; None where none failed."""

    code: int
    cause: Ended | None


class RankProcesses:
    """The ranks of one machine, for one try after the other."""

    def __init__(self, size: int, machines: Machines, logs: Path) -> None:
        """`logs`: a folder inside the run directory; rank 0 makes that directory, and lines wait for it."""
        self._size, self._machines, self._logs = size, machines, logs
        self._live: dict[int, subprocess.Popen[bytes]] = {}
        self._asked: int | None = None  # the signal that was handed on

    def run(self, command: Sequence[str]) -> Outcome:
        """Run `command` on every rank until all have ended."""
        ends: queue.Queue[Ended] = queue.Queue()
        reader, writer = os.pipe()
        with self._signals(), tempfile.TemporaryDirectory(prefix="miles-ranks-") as folder:
            try:
                for local in range(self._machines.per_machine):
                    self._start(command, local, reader, Path(folder) / "store", ends)
                if self._asked is not None:
                    self._hand_on(self._asked)
                return self._outcome(self._wait(ends))
            finally:
                self._kill()
                os.close(reader)
                os.close(writer)

    def _wait(self, ends: queue.Queue[Ended]) -> list[Ended]:
        """Those that ended by themselves; the others are killed when their time is over."""
        ended: list[Ended] = []
        killed, deadline = False, None
        while self._live:
            try:
                end = ends.get(timeout=None if deadline is None else max(deadline - time.monotonic(), 0.0))
            except queue.Empty:
                self._kill()
                killed, deadline = True, None
                continue
            del self._live[end.rank]
            if not killed:
                ended.append(end)
            if end.code and deadline is None:
                deadline = time.monotonic() + (GRACE_S if self._asked is None else STOP_S)
        return ended

    def _start(self, command: Sequence[str], local: int, lifeline: int, store: Path, ends: queue.Queue[Ended]) -> None:
        rank = self._machines.number * self._machines.per_machine + local
        environ = {**os.environ, **self._variables(rank, local, store), LIFELINE: str(lifeline)}
        # Rank 0 has the view, which is for the terminal; what the others print goes where their log goes.
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=None if rank == 0 else subprocess.PIPE,
            stderr=subprocess.PIPE if rank == 0 else subprocess.STDOUT, pass_fds=(lifeline,), start_new_session=True,
        )  # fmt: skip
        self._live[rank] = process
        log = self._logs / f"learner-{rank}.log"
        threading.Thread(target=_watch, args=(rank, process, log, ends), daemon=True).start()

    def _variables(self, rank: int, local: int, store: Path) -> dict[str, str]:
        places = {
            "RANK": rank, "WORLD_SIZE": self._size, "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": self._machines.per_machine,
            "PYTHONUNBUFFERED": 1,
        }  # fmt: skip
        variables = {name: str(value) for name, value in places.items()}
        if self._machines.count == 1:
            # Ranks of one machine meet in a file and talk over the loopback device: nothing is open to others.
            variables |= {STORE: str(store), **only_loopback()}
        return variables

    def _outcome(self, ended: Sequence[Ended]) -> Outcome:
        if self._asked is not None:
            stopped = {-self._asked, 128 + self._asked, 0}
            if all(end.code in stopped for end in ended):
                return Outcome(128 + self._asked if any(end.code for end in ended) else 0, None)
        failed = [end for end in ended if end.code]
        if not failed:
            return Outcome(0, None)
        cause = min(failed, key=blame)
        return Outcome(cause.code, cause)

    def _kill(self) -> None:
        """End every rank that lives, and what it has started."""
        for process in self._live.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _hand_on(self, signum: int) -> None:
        if signum == signal.SIGUSR1:  # asks the one that decides for a checkpoint
            if 0 in self._live:
                self._live[0].send_signal(signum)
            return
        self._asked = signum
        for process in self._live.values():
            process.send_signal(signum)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM go to the ranks, which end with a checkpoint; SIGUSR1 asks for one."""

        def hand_on(signum: int, _frame: FrameType | None) -> None:
            self._hand_on(signum)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {signum: signal.signal(signum, hand_on) for signum in HANDED_ON}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def only_loopback() -> dict[str, str]:
    """Variables that keep what ranks say to each other on their machine."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    return {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}


def blame(end: Ended) -> tuple[int, int]:
    """Which failure is the cause: bad input and aborts, which say why; then deaths; last, what may follow from another's."""
    if end.code in (2, 3):
        return 0, end.rank
    if end.code < 0:
        return 1, end.rank
    return (2 if end.said and "This is a fault in Miles" not in end.said else 3), end.rank


def _watch(rank: int, process: subprocess.Popen[bytes], log: Path, ends: queue.Queue[Ended]) -> None:
    """Wait for the end of a rank, then of what it had started, which may hold its output open."""
    lines: deque[str] = deque(maxlen=TAIL)
    stream = process.stderr if rank == 0 else process.stdout
    assert stream is not None
    reading = threading.Thread(target=keep_lines, args=(stream, lines, log), daemon=True)
    reading.start()
    code = process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    reading.join(GRACE_S)
    ends.put(Ended(rank, code, tuple(lines), log))


def keep_lines(stream: IO[bytes], lines: deque[str], log: Path) -> None:
    """Bring what a process writes into its log, and remember the last lines."""
    waiting: list[bytes] = []
    with stream:
        for line in stream:
            lines.append(line.decode(errors="replace").rstrip())
            waiting.append(line)
            _append(log, waiting)
    _append(log, waiting)


def _append(log: Path, waiting: list[bytes]) -> None:
    """Write down what waits, once the run directory is there. On a full disk lines are lost, and the run says so itself."""
    if not waiting or not log.parent.parent.is_dir():
        return
    with contextlib.suppress(OSError):
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            file.writelines(waiting)
    waiting.clear()


def signal_name(code: int) -> str:
    """The name of the signal that ended a process with the exit code `code` < 0."""
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
