"""Watches over the processes of a run: starts again what died, hands on signals, and ends all of them together.

What a process is made of, and on which machine it stands, is the starter's business. Imports no torch.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from miles.run.processes import HANDED_ON, signal_name
from miles.run.starting import Ended, Handle, Role, Starter

END_S = 5.0
"""For collectors and buffer to end by themselves, and again after SIGTERM; then they are killed."""
CHECKPOINT_S = 600.0
"""For the learner to write its checkpoint after a signal."""
UNHEARD = (2, 3)
"""Exit codes that would only come again: bad input, and training that was aborted to protect the model."""


@dataclass(frozen=True)
class Cast:
    """The roles of a run. `again`: what the learner is started as after it has died."""

    buffer: Role
    collectors: Sequence[Role]
    learner: Role
    again: Callable[[], Role]


@dataclass(frozen=True)
class Outcome:
    """`cause`: the role that ended the run; None where none failed."""

    code: int
    cause: Ended | None = None


@dataclass
class Limit:
    """Restarts of one role: at most `most` in `seconds`."""

    most: int
    seconds: float = 60.0
    _times: deque[float] = field(default_factory=deque)

    def allows(self, now: float) -> bool:
        """Whether one more is within the limit; it is counted then."""
        while self._times and now - self._times[0] > self.seconds:
            self._times.popleft()
        if len(self._times) >= self.most:
            return False
        self._times.append(now)
        return True


class Supervisor:
    """Runs a cast until its learner is done, or something has failed for good."""

    def __init__(
        self, cast: Cast, starter: Starter, restarts: int, per_minute: int, say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`restarts`: of the learner, in all. `per_minute`: of each other role."""
        self._cast, self._starter, self._say, self._clock = cast, starter, say, clock
        self._left, self._restarts = restarts, restarts
        self._limits = {role.name: Limit(per_minute) for role in (cast.buffer, *cast.collectors)}
        self._per_minute = per_minute
        self._live: dict[str, Handle] = {}
        self._began: dict[str, int] = {}  # starts of the learner that each role has seen when it was started
        self._events: queue.SimpleQueue[Ended | int] = queue.SimpleQueue()
        self._asked: int | None = None  # the signal that asked the run to stop

    def run(self, begun: Callable[[], bool]) -> Outcome:
        """Start everything: the learner and the collectors first, the buffer once `begun`, for it needs the run's folder."""
        with self._signals():
            try:
                self._start(self._cast.learner)
                for role in self._cast.collectors:
                    self._start(role)
                outcome = self._until(begun)
                if outcome is None:
                    self._start(self._cast.buffer)
                    outcome = self._until(lambda: False)
                assert outcome is not None
                self._end(outcome)
                return outcome
            finally:
                for handle in self._live.values():
                    handle.kill()

    def _until(self, reached: Callable[[], bool]) -> Outcome | None:
        """Watch until the run has ended, or `reached`."""
        while not reached():
            event = self._next(0.05 if self._cast.buffer.name not in self._live else 1.0)
            if isinstance(event, int):
                self._hand_on(event)
            elif event is not None and (outcome := self._judge(event)) is not None:
                return outcome
        return None

    def _judge(self, end: Ended) -> Outcome | None:
        """What the end of a role means: nothing, for it starts again, or the end of the run."""
        if end.role.name == self._cast.learner.name:
            return self._learner_ended(end)
        if end.role in self._cast.collectors and (end.code == 0 or self._asked is not None):
            if self._asked is None and self._began[end.role.name] < self._learners:
                self._start(end.role)  # it found the run of an earlier learner to be over
            return None
        if end.code in UNHEARD:
            return Outcome(end.code, end)
        if not self._limits[end.role.name].allows(self._clock()):
            return Outcome(1, end)
        self._say(f"{how(end)}: it is started again (logs/{end.role.name}.log)")
        self._start(end.role)
        return None

    def _learner_ended(self, end: Ended) -> Outcome | None:
        if end.code == 0:
            return Outcome(0)
        if self._asked is not None:
            stopped = (128 + self._asked, -self._asked)
            return Outcome(128 + self._asked) if end.code in stopped else Outcome(1, end)
        if end.code in UNHEARD or not self._left:
            return Outcome(end.code if end.code in UNHEARD else 1, end)
        self._left -= 1
        done = self._restarts - self._left
        self._say(f"{how(end)}: it is started again ({done} of run.restarts = {self._restarts})")
        self._start(self._cast.again())
        for role in self._cast.collectors:  # some may have found the run to be over
            if role.name not in self._live:
                self._start(role)
        return None

    def _end(self, outcome: Outcome) -> None:
        """Learner first, with a checkpoint; then those who collect, and last the buffer that both speak to."""
        learner, buffer = self._cast.learner.name, self._cast.buffer.name
        collectors = [role.name for role in self._cast.collectors]
        lost = outcome.cause is not None and outcome.cause.role.name == buffer
        self._stop([learner], signal.SIGTERM, END_S if lost else CHECKPOINT_S)
        if outcome.code == 0:
            self._gone(collectors, END_S)
        self._stop(collectors, signal.SIGTERM, END_S)
        self._stop([buffer], signal.SIGTERM, END_S)

    def _stop(self, names: Sequence[str], signum: int, seconds: float) -> None:
        for name in names:
            if name in self._live:
                self._live[name].signal(signum)
        if not self._gone(names, seconds):
            for name in names:
                if name in self._live:
                    self._live[name].kill()
            self._gone(names, END_S)

    def _gone(self, names: Sequence[str], seconds: float) -> bool:
        """Whether all of them have ended within so many seconds. A signal from outside cuts the wait for the learner short."""
        deadline = self._clock() + seconds
        while any(name in self._live for name in names):
            left = deadline - self._clock()
            if left <= 0:
                return False
            event = self._next(left)
            if isinstance(event, int):
                self._hand_on(event)
        return True

    def _next(self, seconds: float) -> Ended | int | None:
        """The end of a role, which is no longer live then, or the number of a signal; None: neither in this time."""
        try:
            event = self._events.get(timeout=seconds)
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            self._live.pop(event.role.name, None)
        return event

    @property
    def _learners(self) -> int:
        """Starts of the learner so far."""
        return 1 + self._restarts - self._left

    def _start(self, role: Role) -> None:
        self._began[role.name] = self._learners
        self._live[role.name] = self._starter.start(role, self._events.put)

    def _hand_on(self, signum: int) -> None:
        """SIGUSR1 is the learner's; what asks to stop goes to all but the buffer, which the others need to end in order."""
        if signum != signal.SIGUSR1:
            self._asked = signum
        for name, handle in self._live.items():
            takes = name == self._cast.learner.name or signum != signal.SIGUSR1
            if takes and name != self._cast.buffer.name:
                handle.signal(signum)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def put(signum: int, _frame: FrameType | None) -> None:
            self._events.put(signum)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {signum: signal.signal(signum, put) for signum in HANDED_ON}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)


def how(end: Ended) -> str:
    """`collector-1 was ended by SIGKILL`."""
    if end.code >= 0:
        return f"{end.role.name} ended with exit code {end.code}"
    name = signal_name(end.code)
    return f"{end.role.name} was ended by {name}{' (out of memory, or a kill)' if name == 'SIGKILL' else ''}"
