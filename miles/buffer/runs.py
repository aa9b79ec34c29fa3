"""The runs of one buffer service: a folder and a ledger for each, opened when they are first asked for."""

from __future__ import annotations

import asyncio
import secrets
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miles.buffer.api import Registration
from miles.buffer.backend import SQLITE, Where
from miles.buffer.leases import checked_name
from miles.buffer.ledger import Ledger, restore
from miles.buffer.schema import LEDGER_NAME
from miles.buffer.stream import PromptStream
from miles.errors import BadInput, ExperienceError, LedgerLost, RunDirError

MOST_RUNS = 1000


@dataclass
class Changes:
    """Wakes those who wait for something to change in a run."""

    count: int = 0
    _waiting: set[asyncio.Future[None]] = field(default_factory=set)

    def tell(self) -> None:
        self.count += 1
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def wait(self, seen: int, seconds: float) -> None:
        """Until the count is no longer `seen`, or the time is over."""
        if self.count != seen or seconds <= 0:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait_for(future, seconds)
        except TimeoutError:
            return
        finally:
            self._waiting.discard(future)


@dataclass
class Run:
    """One run that is served."""

    name: str
    ledger: Ledger
    changes: Changes = field(default_factory=Changes)


class Runs:
    """Methods may be called from several threads; every name is checked before it touches a path."""

    def __init__(self, folder: Path, where: Where, *, single: bool = False) -> None:
        """`single`: `folder` is that of one run, whose name is asked for first, and not of many."""
        self._folder, self._single = folder, single
        self._where = where
        self._lock = threading.Lock()
        self._open: dict[str, Run] = {}

    def opened(self) -> list[Run]:
        return list(self._open.values())

    def get(self, name: str) -> Run:
        """Raises LedgerLost where there is no such run, ExperienceError where its ledger cannot be opened."""
        run = self._open.get(name)
        if run is not None:
            return run
        checked_name(name, "the run's name")
        with self._lock:
            if name not in self._open:
                self._open[name] = Run(name, self._stored(name))
            return self._open[name]

    def _stored(self, name: str) -> Ledger:
        folder = self._place(name)
        if self._where.ledger == SQLITE and not (folder / LEDGER_NAME).exists():
            raise LedgerLost(f"this buffer holds no run named {name!r}: its learner must register it, or restore it")
        try:
            return Ledger.stored(folder, name, self._where)
        except RunDirError as error:
            raise LedgerLost(f"the run {name!r} cannot be served: {error}") from error

    def register(self, name: str, registration: Registration) -> tuple[Run, bool]:
        """The run, and whether this registration made it. Raises RunDirError where there is another one of this name."""
        checked_name(name, "the run's name")
        checked_name(registration.key, "the key")
        stream, made_by = _stream(registration), {"registered": registration.key}
        with self._lock:
            folder = self._new_folder(name)
            run = self._open.get(name)
            if run is None:
                run = Run(name, self._made(name, folder, registration, stream, made_by))
            else:
                run.ledger.rejoin(registration.settings, stream, registration.identity, folder)
            created = run.ledger.facts() == made_by
            self._open[name] = run
        if not created and not registration.resume:
            raise RunDirError(
                f"the buffer holds a run named {name!r} already: go on with --resume, or choose another buffer.run"
            )
        return run, created

    def _made(
        self, name: str, folder: Path, registration: Registration, stream: PromptStream, made_by: dict[str, Any]
    ) -> Ledger:
        return Ledger(
            folder, registration.settings, stream, registration.identity, resume=True, run=name, where=self._where,
            facts=made_by,
        )  # fmt: skip

    def restore(self, name: str, snapshot: Path) -> None:
        """Make a lost run again. Raises RunDirError where it is there, ExperienceError where the snapshot is damaged."""
        checked_name(name, "the run's name")
        with self._lock:
            if name in self._open:
                raise RunDirError(f"the buffer holds the run {name!r}: a snapshot is for one that was lost")
            restore(self._new_folder(name), snapshot, name, self._where)

    def lose(self, run: Run) -> None:
        """Forget a run whose files are gone, so that it can be restored."""
        with self._lock:
            if self._open.get(run.name) is run:
                del self._open[run.name]
        run.ledger.close()

    def _new_folder(self, name: str) -> Path:
        folder = self._place(name)
        if not folder.exists() and sum(1 for _ in self._folder.iterdir()) > MOST_RUNS:
            raise ExperienceError(f"the buffer holds {MOST_RUNS} runs: move old ones out of {self._folder}")
        folder.mkdir(exist_ok=True)
        return folder

    def _place(self, name: str) -> Path:
        return self._folder if self._single else self._folder / name

    def incoming(self) -> Path:
        """A name for a file that is being received."""
        return self._folder / f".incoming-{secrets.token_hex(8)}"

    def close(self) -> None:
        with self._lock:
            for run in self._open.values():
                run.ledger.close()
            self._open.clear()


def _stream(registration: Registration) -> PromptStream:
    try:
        return PromptStream(**registration.stream)
    except (TypeError, BadInput) as error:
        raise ExperienceError(f"the run's prompt stream cannot be made: {error}") from error
