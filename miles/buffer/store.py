"""The ledger's state on disk: one connection, one segment folder, one run; what reading and writing share."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from miles.buffer.segments import Segments
from miles.buffer.wire import Frame, GroupRefused, decode_group
from miles.errors import ConfigError, ExperienceError
from miles.types import FinishedGroup, Group

_summary_decoder = msgspec.json.Decoder(FinishedGroup)


@dataclass(frozen=True)
class LedgerSettings:
    """The numbers that a ledger works by. Raises ConfigError for values that cannot work."""

    groups_per_step: int  # algorithm.groups_per_step
    max_staleness: int = 0  # buffer.max_staleness: S
    max_attempts: int = 3  # buffer.max_attempts: tries of a prompt before it is dropped as dead
    max_dropped: int | None = None  # rollout.max_dropped. None: 10 * groups_per_step
    group_size: int | None = None  # samples of each group. None: any number
    vocabulary: int | None = None  # token ids are below it. None: below 2**31
    keep_dropped: bool = True  # also store the samples of dropped groups
    inline_bytes: int = 128 << 10  # payloads of this size and more go to segment files
    segment_bytes: int = 256 << 20  # a segment file of this size is left for a new one

    def __post_init__(self) -> None:
        lowest = {
            "algorithm.groups_per_step": (self.groups_per_step, 1),
            "buffer.max_staleness": (self.max_staleness, 0),
        }
        lowest["buffer.max_attempts"] = (self.max_attempts, 1)
        if self.max_dropped is not None:
            lowest["rollout.max_dropped"] = (self.max_dropped, 1)
        problems = [
            f"{key} is {value}: it must be at least {low}" for key, (value, low) in lowest.items() if value < low
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def drop_limit(self) -> int:
        """Dropped groups within one step before it trains on what is there."""
        return 10 * self.groups_per_step if self.max_dropped is None else self.max_dropped


@dataclass(frozen=True, slots=True)
class RunRow:
    """The one row of table `run`: all cursors of a run."""

    max_stale: int
    groups_per_step: int
    next_ordinal: int  # ordinals below it are issued
    next_step: int  # manifests below it exist
    committed_step: int  # version of the oldest checkpoint kept; 0 before the first
    weight_version: int  # newest version that a learner has reached


class Store:
    """Runs statements for one run; the lock lets several threads of a process share the connection."""

    def __init__(self, db: sqlite3.Connection, path: Path, segments: Segments, run: str) -> None:
        self.db = db
        self.path = path
        self.segments = segments
        self.run = run
        self._lock = threading.RLock()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing, and durable when it ends. Raises ExperienceError where the disk fails."""
        with self._lock, self._disk_errors():
            self.db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self.db.execute("COMMIT")
            except BaseException:
                # SQLite has ended the transaction itself after some disk errors.
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")
                raise

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One thread at a time. Raises ExperienceError where the disk fails."""
        with self._lock, self._disk_errors():
            yield

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise ExperienceError(
                f"the ledger {self.path} could not be read or written ({error}): nothing that it had acknowledged is lost. "
                "Free space on the disk or repair it, then continue the run with --resume"
            ) from error

    def all(self, statement: str, *values: Any) -> list[sqlite3.Row]:
        """Rows of a statement whose first parameter is the run."""
        return self.db.execute(statement, (self.run, *values)).fetchall()

    def one(self, statement: str, *values: Any) -> sqlite3.Row | None:
        return self.db.execute(statement, (self.run, *values)).fetchone()

    def value(self, statement: str, *values: Any) -> Any:
        """The first column of the one row that a statement gives."""
        return self.db.execute(statement, (self.run, *values)).fetchone()[0]

    def state(self) -> RunRow:
        """The run's cursors."""
        row = self.one(
            "SELECT max_stale, groups_per_step, next_ordinal, next_step, committed_step, weight_version FROM run WHERE id = ?"
        )
        assert row is not None
        return RunRow(*row)

    def event(self, time: float, kind: str, detail: Mapping[str, Any]) -> None:
        self.db.execute(
            "INSERT INTO event VALUES (?, ?, ?, ?)", (self.run, time, kind, msgspec.json.encode(detail).decode())
        )

    def payload(self, ordinal: int) -> Frame:
        """The stored bytes of a finished group. Raises ExperienceError where there are none."""
        row = self.one(
            'SELECT segment, "offset", length, hash, payload FROM grp WHERE run = ? AND ordinal = ?', ordinal
        )
        if row is None:
            raise ExperienceError(f"the ledger {self.path} holds no group for ordinal {ordinal}")
        if row["segment"] is None:
            return Frame(row["payload"], row["hash"])
        return Frame(self.segments.read(row["segment"], row["offset"], row["length"]), row["hash"])

    def group(self, ordinal: int) -> Group:
        """A finished group, its bytes checked against their hash. Raises ExperienceError."""
        frame = self.payload(ordinal)
        try:
            return decode_group(frame.payload, frame.digest)
        except GroupRefused as error:
            raise ExperienceError(
                f"ordinal {ordinal} of the ledger {self.path} was altered on the disk: {error}; put back a copy of the run "
                "directory, or start a new run"
            ) from error


def decode_summary(text: str | bytes) -> FinishedGroup:
    """A summary as the ledger keeps it."""
    return _summary_decoder.decode(text)


def encode_summary(summary: FinishedGroup) -> str:
    return msgspec.json.encode(summary).decode()
