"""How a learner joins a buffer that collectors in other processes fill. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miles.buffer.client import RemoteSource
from miles.buffer.payloads import Payloads
from miles.buffer.rewinding import RewindMode
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.config.schema import Recipe
from miles.protocols import ExperienceSource
from miles.run.meeting import Meeting
from miles.types import Group

LOOK_S = 1.0


@dataclass(frozen=True)
class OpenBuffer:
    """The learner's side of the buffer; `rewind`: how a resumed learner goes back to its checkpoint.

    `end`: called when the run has ended well, so that collectors in other processes end too.
    """

    source: ExperienceSource
    rewind: RewindMode
    end: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class RunFacts:
    """What makes the run this run."""

    settings: LedgerSettings
    stream: PromptStream
    identity: Mapping[str, Any]


@contextmanager
def join_buffer(
    meeting: Meeting, facts: RunFacts, look: Callable[[], None], snapshot: Path | None, *, resume: bool
) -> Iterator[OpenBuffer]:
    """The buffer of a learner that does not collect. `look` is called while it waits, and may raise.

    `snapshot`: of the ledger, in the checkpoint that the learner goes on from, to make a lost one again. Raises RunDirError
    where the buffer holds another run, or one and `resume` is False; BadInput where it cannot be joined.
    """
    with WaitingSource(meeting.address(), facts.settings.vocabulary, look, meeting.payloads()) as source:
        lost = registered(source, facts, snapshot, resume=resume)
        yield OpenBuffer(source, "resample" if lost else "replay", lambda: source.end("the learner is done"))


class WaitingSource(RemoteSource):
    """A source whose `take` looks up from its waiting, so that a signal is noticed where it must not interrupt."""

    def __init__(
        self, address: Address, vocabulary: int | None, look: Callable[[], None], payloads: Payloads | None = None
    ) -> None:
        super().__init__(address, vocabulary, payloads=payloads)
        self._look = look

    def take(self, version: int) -> list[Group]:
        while (groups := self.take_now(version, wait=LOOK_S)) is None:
            self._look()
        return groups


def registered(source: RemoteSource, facts: RunFacts, snapshot: Path | None, *, resume: bool) -> bool:
    """Make or join the run at the service; True where it was lost there, and was made again from the snapshot."""
    lost = snapshot is not None and not source.exists()
    if snapshot is not None and lost:
        source.restore(snapshot)
    source.register(facts.settings, facts.stream, facts.identity, resume=resume)
    return lost


def ledger_settings(recipe: Recipe, group_size: int | None, vocabulary: int) -> LedgerSettings:
    """The numbers that the recipe's ledger works by. `group_size`: samples of each group; None: any number."""
    buffer = recipe.buffer
    return LedgerSettings(
        groups_per_step=recipe.algorithm.groups_per_step, max_staleness=buffer.max_staleness,
        max_attempts=buffer.max_attempts, max_dropped=recipe.rollout.max_dropped, keep=buffer.keep,
        max_refused=buffer.max_refused, min_free_bytes=buffer.min_free_mb << 20, group_size=group_size,
        vocabulary=vocabulary,
    )  # fmt: skip
