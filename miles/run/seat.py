"""One process of a role as something at a distance holds it: it is started, its lines are fetched, it is signalled. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from miles.run.lifeline import LIFELINE
from miles.run.processes import GRACE_S

LOOK_S = 5.0
"""How long a call of `output` waits for something to be written."""
MOST_WAITING = 4096
"""Lines that wait to be fetched; a process that writes more waits too."""
SECRETS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""Of the cluster: what a role runs, such as a reward function, has no use for them."""

Line = tuple[bool, bytes]
"""Whether it is for the terminal, and what was written."""


@dataclass(frozen=True)
class Order:
    """What is started. `recipe`: content of the file that the word `recipe_word` of the command stands for."""

    command: Sequence[str]  # its first word is the interpreter, which every machine has in a place of its own
    environ: Mapping[str, str]
    folder: str  # that it is started in
    shown: bool  # what it prints is for the terminal, only its errors are for the log
    recipe_word: str
    recipe: str


class Seat:
    """Holds one process, which ends when the process that this object lives in does. Its methods may run side by side."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[Line | int] = queue.Queue(MOST_WAITING)
        self._lifeline, self._held = os.pipe()
        self.folder = str(
            Path(tempfile.gettempdir()) / f"miles-seat-{secrets.token_hex(8)}"
        )  # there while a process runs
        self._lock = threading.Lock()
        self._early: int | None = None  # a signal that came before the process

    def lacks(self, paths: Sequence[str]) -> list[str]:
        """Those that this machine does not see."""
        return [path for path in paths if not Path(path).exists()]

    def start(self, order: Order) -> None:
        os.mkdir(self.folder, 0o700)
        recipe = Path(self.folder) / "recipe.toml"
        recipe.write_text(order.recipe, encoding="utf-8")
        words = [str(recipe) if word == order.recipe_word else word for word in order.command[1:]]
        environ = {name: value for name, value in os.environ.items() if name not in SECRETS}
        environ |= {**order.environ, "PYTHONUNBUFFERED": "1", LIFELINE: str(self._lifeline)}
        with self._lock:
            self._process = subprocess.Popen(
                [sys.executable, *words], env=environ, cwd=order.folder, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE if order.shown else subprocess.STDOUT,
                pass_fds=(self._lifeline,), start_new_session=True,
            )  # fmt: skip
            if self._early is not None:
                self._process.send_signal(self._early)
        threading.Thread(target=self._watch, args=(self._process, order.shown), daemon=True).start()

    def output(self) -> tuple[list[Line], int | None]:
        """The lines since the last call, waiting for some; and the exit code, once there is nothing more to come."""
        found: list[Line] = []
        with contextlib.suppress(queue.Empty):
            while True:
                piece = self._lines.get_nowait() if found else self._lines.get(timeout=LOOK_S)
                if isinstance(piece, int):
                    return found, piece
                found.append(piece)
        return found, None

    def signal(self, signum: int) -> None:
        with self._lock:
            if self._process is None:
                self._early = signum
            else:
                self._process.send_signal(signum)

    def _watch(self, process: subprocess.Popen[bytes], shown: bool) -> None:
        """Wait for the end of the process, then of what it had started, which may hold its output open."""
        streams = [(process.stdout, shown), (process.stderr, False)]
        reading = [
            threading.Thread(target=self._read, args=(stream, for_terminal), daemon=True)
            for stream, for_terminal in streams
            if stream is not None
        ]
        for thread in reading:
            thread.start()
        code = process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for thread in reading:
            thread.join(GRACE_S)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lines.put(code)

    def _read(self, stream: IO[bytes], for_terminal: bool) -> None:
        with stream:
            for line in stream:
                self._lines.put((for_terminal, line))
