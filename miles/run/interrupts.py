"""Ctrl-C and SIGTERM: work that must be whole is finished first, then the run stops with a checkpoint.

SIGUSR1 asks for a checkpoint at the end of the step, and the run goes on.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
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

    def __init__(self, *, held: bool = False) -> None:
        """`held`: signals wait everywhere, until the end of `cancelling` or a `check`: ranks of a run stop together."""
        self._held = held
        self._depth = 0
        self._pending: int | None = None
        self._cancel: Callable[[], None] | None = None
        self._wants_checkpoint = False

    def take_wish(self) -> bool:
        """Whether a checkpoint has been asked for since the last call."""
        wanted, self._wants_checkpoint = self._wants_checkpoint, False
        return wanted

    @contextmanager
    def active(self) -> Iterator[None]:
        """Outside of the main thread nothing changes: Python hands signals to that one alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_wish)
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
        if self._depth == 0 and not self._held:
            self._raise_pending()

    def check(self) -> None:
        """Raises Interrupted where a signal has come and waits."""
        self._raise_pending()

    @contextmanager
    def cancelling(self, cancel: Callable[[], None]) -> Iterator[None]:
        """Inside, the first signal calls `cancel`, which ends the block early and in order; then Interrupted is raised.

        A second signal does not wait for that.
        """
        self._cancel = cancel
        if self._held and self._pending is not None and self._depth == 0:
            cancel()
        try:
            yield
        except BaseException:
            if self._pending is None or self._depth:
                raise
        finally:
            self._cancel = None
        if self._depth == 0:
            self._raise_pending()

    def _raise_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            raise Interrupted(pending)

    def _on_wish(self, signum: int, _frame: FrameType | None) -> None:
        self._wants_checkpoint = True

    def _on_signal(self, signum: int, _frame: FrameType | None) -> None:
        if self._depth:
            self._pending = signum
        elif self._cancel is not None and self._pending is None:
            self._pending = signum
            self._cancel()
        elif self._held:
            self._pending = signum
        else:
            self._pending = None
            raise Interrupted(signum)
