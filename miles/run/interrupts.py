"""Ctrl-C and SIGTERM: work that must be whole is finished first, then the run stops with a checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A signal asked the run to stop. A KeyboardInterrupt, so that no handler of ordinary errors swallows it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def exit_code(self) -> int:
        return 128 + self.signum


class Interrupts:
    """While active, SIGINT and SIGTERM raise Interrupted; inside `whole()` they wait until its end."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending: int | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    @contextmanager
    def whole(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._depth == 0 and self._pending is not None:
            pending, self._pending = self._pending, None
            raise Interrupted(pending)

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._depth:
            self._pending = signum
        else:
            raise Interrupted(signum)
