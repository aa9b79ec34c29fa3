"""What a ledger stands on: SQLite and segment files in a folder, or PostgreSQL, or an object store for large payloads."""

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
from miles.errors import ExperienceError

SQLITE = "sqlite"
LOCAL = "local"


@dataclass(frozen=True)
class Where:
    """Where ledger and large payloads are: `buffer.ledger` and `buffer.payloads`."""

    ledger: str = SQLITE  # or postgresql://...
    payloads: str = LOCAL  # segment files; or s3://bucket/prefix
    segment_bytes: int = 256 << 20


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
    if where.ledger != SQLITE:
        return Backend(_postgres(where.ledger), open_payloads(folder, where))
    refuse_network_file_system(folder)
    lock = RunLock(folder)
    try:
        payloads = open_payloads(folder, where)
        path = folder / LEDGER_NAME
        return Backend(SqliteDatabase(_opened(_connect, path), path), payloads, lock)
    except BaseException:
        lock.release()
        raise


def open_readonly(folder: Path, where: Where) -> Backend:
    """For reading beside whoever writes, or after. Raises RunDirError where there is no ledger."""
    path = folder / LEDGER_NAME
    if where.ledger != SQLITE:
        return Backend(_postgres(where.ledger), open_payloads(folder, where))
    return Backend(SqliteDatabase(_opened(connect_readonly, path), path), open_payloads(folder, where))


def _postgres(url: str) -> Database:
    from miles.buffer.postgres import PostgresDatabase

    return PostgresDatabase(url)


def open_payloads(folder: Path, where: Where) -> Payloads:
    """Where large groups lie. Raises BadInput where it cannot be used."""
    if where.payloads == LOCAL:
        return Segments(folder / SEGMENTS_NAME, where.segment_bytes)
    from miles.buffer.objects import Objects

    return Objects(where.payloads)


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
