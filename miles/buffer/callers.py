"""Who called before: calls that are repeated, delayed or out of order by a network have the effect of one.

A client counts its own calls under a session of its own, and has one of a kind under way at a time. So one number for each
session tells a repeated call (the same number) from a new one (a higher one) and from one that was left behind (a lower one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from miles.buffer.store import Store
from miles.errors import ExperienceError, LearnerFenced

FORGOTTEN_AFTER_S = 7 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class Call:
    """The `number`-th call of a session."""

    session: str
    number: int

    @property
    def key(self) -> str:
        return f"{self.session}/{self.number}"


class Callers:
    """Sessions of one run. Every method runs inside a transaction of the store."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store = store
        self._clock = clock

    def is_new(self, call: Call) -> bool:
        """False where this call had its effect before. Raises ExperienceError where a later one has come already."""
        row = self._store.one("SELECT number FROM caller WHERE run = ? AND session = ?", call.session)
        if row is not None and call.number < row["number"]:
            raise ExperienceError(f"call {call.number} of session {call.session} comes after call {row['number']}")
        return row is None or call.number > row["number"]

    def note(self, call: Call) -> None:
        """The call has had its effect."""
        now = self._clock()
        self._store.db.execute("DELETE FROM caller WHERE run = ? AND session = ?", (self._store.run, call.session))
        self._store.db.execute(
            "INSERT INTO caller VALUES (?, ?, ?, ?)", (self._store.run, call.session, call.number, now)
        )
        self._store.db.execute(
            "DELETE FROM caller WHERE run = ? AND time < ?", (self._store.run, now - FORGOTTEN_AFTER_S)
        )

    def check_learner(self, session: str | None) -> None:
        """The first learner holds the run until another one rewinds it. None: the process that has the ledger open.

        Raises LearnerFenced.
        """
        holder = self._store.state().learner
        if session is None or session == holder:
            return
        if holder is None:
            self._store.set(learner=session)
            return
        raise LearnerFenced(
            f"another learner (session {holder[:8]}) holds this run: end this process, or start again with --resume to take "
            "the run over"
        )

    def take_over(self, call: Call) -> bool:
        """The learner of this session holds the run from now on; False where the call had its effect before.

        Raises LearnerFenced for a session that was itself taken over from.
        """
        state = self._store.state()
        known = self._store.one("SELECT number FROM caller WHERE run = ? AND session = ?", call.session)
        if known is not None and state.learner != call.session:
            raise LearnerFenced(
                f"the session {call.session[:8]} was taken over by {str(state.learner)[:8]}: end this process"
            )
        if known is not None and call.number <= known["number"]:
            return False
        self._store.set(learner=call.session)
        self.note(call)
        return True
