"""What a ledger stands on: SQLite and segment files in a folder."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from miles.buffer.database import Database, SqliteDatabase
from miles.buffer.payloads import Payloads
from miles.buffer.place import RunLock, refuse_network_file_system
from miles.buffer.schema import LEDGER_NAME, SEGMENTS_NAME, connect, connect_readonly
from miles.buffer.segments import Segments, fsync_folder
from miles.errors import BadInput, ExperienceError

SQLITE = "sqlite"
LOCAL = "local"


def _check_known(where: Where) -> None:
    for key, value, known in (("ledger", where.ledger, SQLITE), ("payloads", where.payloads, LOCAL)):
        if value != known:
            raise BadInput(
                f"buffer.{key} (--{key} of miles buffer) names another place: this version keeps runs in SQLite and in files beside it "
                f"only; leave it at {known!r}"
            )


@dataclass(frozen=True)
class Where:
    """Where ledger and large payloads are: `buffer.ledger` and `buffer.payloads`."""

    ledger: str = SQLITE
    payloads: str = LOCAL  # segment files
    segment_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        """Raises BadInput for places that are not built."""
        _check_known(self)


ON_THIS_MACHINE = Where()


@dataclass
class Backend:
    """An open database and an open place for payloads."""

    db: Database
    payloads: Payloads
    lock: RunLock | None = None  # None: the database keeps writers apart, or nothing is written

    def close(self) -> None:
        self.db.close()
        self.payloads.close()
        if self.lock is not None:
            self.lock.release()


def open_backend(folder: Path, where: Where) -> Backend:
    """For writing; makes the tables. Raises RunDirError, BadInput and ExperienceError."""
    refuse_network_file_system(folder)
    lock = RunLock(folder)
    try:
        payloads = _payloads(folder, where)
        path = folder / LEDGER_NAME
        return Backend(SqliteDatabase(_opened(_connect, path), path), payloads, lock)
    except BaseException:
        lock.release()
        raise


def open_readonly(folder: Path, where: Where) -> Backend:
    """For reading beside whoever writes, or after. Raises RunDirError where there is no ledger."""
    path = folder / LEDGER_NAME
    return Backend(SqliteDatabase(_opened(connect_readonly, path), path), _payloads(folder, where))


def _payloads(folder: Path, where: Where) -> Payloads:
    return Segments(folder / SEGMENTS_NAME, where.segment_bytes)


def _connect(path: Path) -> sqlite3.Connection:
    db = connect(path)
    fsync_folder(path.parent)
    return db


def _opened(connect: Callable[[Path], sqlite3.Connection], path: Path) -> sqlite3.Connection:
    try:
        return connect(path)
    except (sqlite3.Error, OSError) as error:
        raise ExperienceError(
            f"the ledger {path} could not be opened ({error}): free space on the disk, or put a copy back that is whole, then start again"
        ) from error
