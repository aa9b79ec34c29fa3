"""The ranks of a run at the points where one of them decides: rank 0 leads, the others do what it calls for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from miles import errors
from miles.errors import ConfigError, MilesError
from miles.learn.channel import Channel
from miles.run.interrupts import Interrupted

T = TypeVar("T")
Duty = Callable[..., Any]


class Crew:
    """All ranks make the same calls of `together`; inside, rank 0 runs an action, and the others what the action calls.

    So what only rank 0 can know (the ledger, the run directory, a signal) is decided once, and an error that rank 0 meets
    is raised on every rank. A process that is alone is a crew of one.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._duties: Mapping[str, Duty] = {}

    @property
    def leads(self) -> bool:
        return self.channel.rank == 0

    @property
    def size(self) -> int:
        return self.channel.size

    def take_up(self, duties: Mapping[str, Duty]) -> None:
        """What every rank does when rank 0 calls for it, by name."""
        self._duties = duties

    def call(self, duty: str, **facts: Any) -> Any:
        """Rank 0, inside of an action: all ranks do this now; what rank 0's part returns. `facts` are JSON."""
        self._tell({"call": duty, "facts": facts})
        return self._duties[duty](**facts)

    def together(self, action: Callable[[], T]) -> T | None:
        """Rank 0: run the action and return what it returns. The others: do what it calls for until it has ended.

        Raises on every rank what the action raises, where that is a MilesError or Interrupted; any other error ends rank 0.
        """
        if self.size == 1:
            return action()
        if not self.leads:
            self._follow()
            return None
        try:
            result = action()
        except (MilesError, Interrupted) as error:
            self._tell({"raise": said(error)})
            raise
        self._tell({"done": True})
        return result

    def agree(self, action: Callable[[], T]) -> T:
        """As `together`, and every rank gets rank 0's result, which is JSON."""
        result = self.together(action)
        return result if self.size == 1 else json.loads(self.channel.broadcast(json.dumps(result).encode()))

    def _tell(self, order: Mapping[str, Any]) -> None:
        if self.size > 1:
            self.channel.broadcast(json.dumps(order).encode())

    def _follow(self) -> None:
        own: MilesError | None = None
        while True:
            order = json.loads(self.channel.broadcast())
            if "raise" in order:
                raise heard(order["raise"])
            if "done" in order:
                break
            try:
                self._duties[order["call"]](**order["facts"])
            except MilesError as error:  # a duty that fails for one rank fails for rank 0 too, which says what follows
                own = error
        if own is not None:
            raise own


def said(error: BaseException) -> dict[str, Any]:
    """An error as JSON."""
    if isinstance(error, Interrupted):
        return {"kind": "Interrupted", "signum": error.signum}
    problems = error.problems if isinstance(error, ConfigError) else None
    return {"kind": type(error).__name__, "text": str(error), "problems": problems}


def heard(error: Mapping[str, Any]) -> BaseException:
    """The error that `said` has told of."""
    if error["kind"] == "Interrupted":
        return Interrupted(error["signum"])
    kind = getattr(errors, error["kind"], None)
    if not (isinstance(kind, type) and issubclass(kind, MilesError)) or kind is errors.RankFailed:
        kind = MilesError
    return kind(error["problems"] or error["text"])
