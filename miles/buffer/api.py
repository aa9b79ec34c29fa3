"""What client and service of the buffer say to each other: messages, limits, and which error is which status.

Bodies are MessagePack, checked against the types below before anything is done. Every call may be repeated.
"""

from __future__ import annotations

from typing import Any

import msgspec

from miles.buffer.rewinding import RewindMode
from miles.buffer.settings import LedgerSettings
from miles.errors import (
    BufferClosed,
    DiskFull,
    ExperienceError,
    GroupRefused,
    LearnerFenced,
    LeaseLost,
    LedgerLost,
    LedgerUnreachable,
    MilesError,
    NothingToTrain,
    PoisonedData,
    RunDirError,
)
from miles.types import Lease

VERSION = "v1"
MSGPACK = "application/msgpack"
RECORD = "application/x-miles-record+msgpack"
"""Type of a put whose group already lies in the object store: a `Record` without bytes."""
DIGEST = "x-miles-sha256"
MAX_CALL_BYTES = 1 << 20
MAX_GROUP_BYTES = 256 << 20
MAX_SNAPSHOT_BYTES = 8 << 30
MAX_PAGE_BYTES = 32 << 20
MAX_LEASES = 10_000
MAX_WAIT_S = 30.0
MAX_TTL_S = 7 * 24 * 3600.0


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A body. Unknown fields are refused: a misspelt one would be ignored otherwise."""


class Registration(Message):
    """What makes a run this run; `key` is drawn once for each attempt to register it."""

    identity: dict[str, Any]
    settings: LedgerSettings
    stream: dict[str, Any]
    resume: bool
    key: str


class LeaseCall(Message):
    n: int
    worker: str
    ttl: float
    session: str
    number: int
    wait: float = 0.0


class Leases(Message):
    leases: list[Lease]


class Worker(Message):
    """A worker that begins under its name: what an earlier process of that name holds is given back."""

    worker: str


class Drop(Message):
    lease: Lease
    reason: str
    digest: str | None = None
    group: bytes | None = None


class LearnerCall(Message):
    """A call of the learner of this session."""

    session: str
    wait: float = 0.0


class Commit(Message):
    version: int
    checkpoint: str
    session: str


class Rewind(Message):
    version: int
    mode: RewindMode
    session: str
    number: int


class Version(Message):
    version: int
    session: str


class End(Message):
    reason: str
    session: str


class Step(Message):
    """A manifest: (ordinal, SHA-256 of the group) in its order, and why it is short."""

    groups: list[tuple[int, str]]
    short: str | None


class Stored(Message):
    """One group of a manifest: its bytes, or the object in the store that holds them."""

    ordinal: int
    digest: str
    length: int
    payload: bytes | None = None
    object: str | None = None


class Problem(Message):
    """The body of every refusal."""

    error: str
    message: str
    reason: str = ""


STATUS: dict[type[MilesError], int] = {
    GroupRefused: 422,
    LeaseLost: 409,
    LearnerFenced: 409,
    DiskFull: 507,
    BufferClosed: 410,
    NothingToTrain: 410,
    PoisonedData: 410,
    LedgerLost: 404,
    LedgerUnreachable: 503,
    RunDirError: 409,
    ExperienceError: 409,
}
ERRORS = {kind.__name__: kind for kind in STATUS}


def problem_of(error: MilesError) -> tuple[int, Problem]:
    """Status and body for an error."""
    kind = next((kind for kind in type(error).__mro__ if kind in STATUS), ExperienceError)
    reason = error.reason if isinstance(error, GroupRefused) else ""
    status = 409 if reason == "conflict" else STATUS[kind]
    return status, Problem(kind.__name__, str(error), reason)


def error_of(problem: Problem) -> MilesError:
    """The error that a refusal stands for."""
    kind = ERRORS.get(problem.error, ExperienceError)
    return GroupRefused(problem.message, problem.reason) if kind is GroupRefused else kind(problem.message)
