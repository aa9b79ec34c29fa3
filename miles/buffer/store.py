"""The ledger's state: one database, one place for large payloads, one run; transactions, and what reading and writing share."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from miles.buffer.database import Database
from miles.buffer.payloads import Payloads, Place
from miles.buffer.wire import Frame, decode_group
from miles.errors import DiskFull, ExperienceError, GroupRefused
from miles.types import FinishedGroup, Group

T = TypeVar("T")
MOST_JOBS = 64
FULL = (errno.ENOSPC, errno.EDQUOT)

_summary_decoder = msgspec.json.Decoder(FinishedGroup)


@dataclass(frozen=True, slots=True)
class RunRow:
    """The one row of table `run`: all cursors of a run."""

    max_stale: int
    groups_per_step: int
    next_ordinal: int  # ordinals below it are issued
    next_step: int  # manifests below it exist
    committed_step: int  # version of the oldest checkpoint kept; 0 before the first
    weight_version: int  # newest version that a learner has reached
    epoch: int  # times the run was rewound to sample again
    kept_from: int  # groups of manifests below it were deleted
    learner: str | None  # session of the learner that holds the run. None: nobody has claimed it
    stored: int  # groups accepted since the last rewind
    refused: int  # groups refused since the last rewind
    ended: str | None  # why nothing more is leased. None: the run goes on


class _Job(Generic[T]):
    """One caller's part of a transaction that several callers share."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work = work
        self.done = False
        self.error: BaseException | None = None
        self.value: T | None = None


class Store:
    """Runs statements for one run; locks let several threads of a process share the connection."""

    def __init__(self, db: Database, payloads: Payloads, run: str) -> None:
        self.db = db
        self.payloads = payloads
        self.run = run
        self.name = db.name
        self._lock = threading.Lock()
        self._queue: list[_Job[Any]] = []
        self._queue_lock = threading.Lock()

    def write(self, work: Callable[[], T]) -> T:
        """Run `work` in a transaction and return what it returns, once that is durable. All of it, or an error.

        Group commit: whoever gets the lock runs what has queued up meanwhile and makes all of it durable at once. Each
        piece of work stands alone: one that raises leaves no trace and hinders no other. Raises DiskFull and
        ExperienceError where the disk fails.
        """
        job = _Job(work)
        with self._queue_lock:
            self._queue.append(job)
        with self._lock:
            while not job.done:
                with self._queue_lock:
                    batch, self._queue = self._queue[:MOST_JOBS], self._queue[MOST_JOBS:]
                self._commit(batch)
        if job.error is not None:
            raise job.error
        return job.value  # type: ignore[return-value]

    def _commit(self, batch: Sequence[_Job[Any]]) -> None:
        try:
            with self._disk_errors():
                self.db.begin(self.run)
                try:
                    for job in batch:
                        self._run(job)
                    self.payloads.sync()
                    self.db.commit()
                except BaseException:
                    self.db.rollback()
                    raise
        except BaseException as error:
            for job in batch:
                job.error = job.error or error
            if not isinstance(error, Exception):
                raise
        finally:
            for job in batch:
                job.done = True

    def _run(self, job: _Job[Any]) -> None:
        self.db.execute("SAVEPOINT job")
        try:
            with self._disk_errors():
                job.value = job.work()
        except Exception as error:
            self.db.execute("ROLLBACK TO SAVEPOINT job")
            job.error = error
        self.db.execute("RELEASE SAVEPOINT job")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """One thread at a time, of a state that stands still. Raises ExperienceError where the disk fails."""
        with self._lock, self._disk_errors():
            self.db.begin(None)
            try:
                yield
            finally:
                self.db.rollback()

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except (*self.db.errors, OSError) as error:
            full = self.db.is_full(error) or getattr(error, "errno", None) in FULL
            raise (DiskFull if full else ExperienceError)(
                f"the ledger {self.name} could not be read or written ({error}): nothing that it had acknowledged is lost. "
                "Free space on the disk or repair it, then continue the run with --resume"
            ) from error

    def all(self, statement: str, *values: Any) -> Sequence[Any]:
        """Rows of a statement whose first parameter is the run."""
        return self.db.query(statement, (self.run, *values))

    def one(self, statement: str, *values: Any) -> Any:
        """The first row, or None."""
        rows = self.db.query(statement, (self.run, *values))
        return rows[0] if rows else None

    def value(self, statement: str, *values: Any) -> Any:
        """The first column of the one row that a statement gives."""
        return self.db.query(statement, (self.run, *values))[0][0]

    def state(self) -> RunRow:
        """The run's cursors."""
        row = self.one(
            "SELECT max_stale, groups_per_step, next_ordinal, next_step, committed_step, weight_version, epoch, kept_from, "
            "learner, stored, refused, ended FROM run WHERE id = ?"
        )
        return RunRow(*row)

    def set(self, **columns: Any) -> None:
        """Change cursors of the run."""
        names = ", ".join(f"{name} = ?" for name in columns)
        self.db.execute(f"UPDATE run SET {names} WHERE id = ?", (*columns.values(), self.run))

    def event(self, time: float, kind: str, detail: Mapping[str, Any]) -> None:
        self.db.execute(
            "INSERT INTO event (run, time, kind, json) VALUES (?, ?, ?, ?)",
            (self.run, time, kind, msgspec.json.encode(detail).decode()),
        )

    def name_of(self, ordinal: int, digest: str) -> str:
        """What a payload is called in an object store."""
        return f"{self.run}/{ordinal}-{digest}"

    def located(self, ordinal: int) -> tuple[Frame | None, str | None, str, int]:
        """A group's bytes where the ledger or its segments hold them, or the object that does; hash and length."""
        row = self.one("SELECT object, length, hash FROM grp WHERE run = ? AND ordinal = ?", ordinal)
        if row is not None and row["object"] is not None:
            return None, row["object"], row["hash"], row["length"]
        frame = self.payload(ordinal)
        return frame, None, frame.digest, len(frame.payload)

    def payload(self, ordinal: int) -> Frame:
        """The stored bytes of a finished group. Raises ExperienceError where there are none."""
        row = self.one(
            'SELECT segment, "offset", object, length, hash, payload FROM grp WHERE run = ? AND ordinal = ?', ordinal
        )
        if row is None:
            raise ExperienceError(f"the ledger {self.name} holds no group for ordinal {ordinal}")
        if row["payload"] is not None:
            return Frame(bytes(row["payload"]), row["hash"])
        place = Place(row["segment"], row["offset"], row["object"])
        if place == Place():
            raise ExperienceError(
                f"the group of ordinal {ordinal} was deleted from the ledger {self.name}: it lies below the oldest checkpoint "
                'and buffer.keep is "checkpoints"'
            )
        return Frame(self.payloads.read(place, row["length"]), row["hash"])

    def group(self, ordinal: int) -> Group:
        """A finished group, its bytes checked against their hash. Raises ExperienceError."""
        frame = self.payload(ordinal)
        try:
            return decode_group(frame.payload, frame.digest)
        except GroupRefused as error:
            raise ExperienceError(
                f"ordinal {ordinal} of the ledger {self.name} was altered on the disk: {error}; put back a copy of the run "
                "directory, or start a new run"
            ) from error

    def close(self) -> None:
        self.db.close()
        self.payloads.close()


def decode_summary(text: str | bytes) -> FinishedGroup:
    """A summary as the ledger keeps it."""
    return _summary_decoder.decode(text)


def encode_summary(summary: FinishedGroup) -> str:
    return msgspec.json.encode(summary).decode()
