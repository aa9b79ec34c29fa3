"""The little that the ledger asks of a database, and SQLite behind it; `postgres.py` is the other one.

Statements are written once, in the SQL that both understand, with `?` for values.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from miles.errors import LedgerLost


class Row(Protocol):
    """A row of an answer, by name or by place."""

    def __getitem__(self, key: Any, /) -> Any: ...

    def __iter__(self) -> Any: ...


class Database(Protocol):
    """One connection. Not more than one thread uses it at a time."""

    errors: tuple[type[Exception], ...]  # what a failing disk, server or network raises
    shared: bool  # other processes may write the same runs
    name: str  # for messages; holds no password

    def query(self, statement: str, values: Sequence[Any] = ()) -> Sequence[Any]:
        """The rows of a SELECT."""
        ...

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        """The number of rows that a statement changed."""
        ...

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]]) -> None: ...

    def begin(self, run: str | None) -> None:
        """Begin a transaction: one that writes `run`, alone, or (None) one that reads a state that stands still."""
        ...

    def commit(self) -> None:
        """End the transaction; what it wrote is durable afterwards."""
        ...

    def rollback(self) -> None:
        """End the transaction without a trace; without one, nothing happens."""
        ...

    def is_full(self, error: Exception) -> bool:
        """Whether an error says that there is no space left."""
        ...

    def close(self) -> None: ...


class SqliteDatabase:
    """A connection of `schema.connect` or `connect_readonly`."""

    errors = (sqlite3.Error,)
    shared = False

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._file = _file_of(path)
        self.name = str(path)

    def query(self, statement: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        return self._connection.execute(statement, values).fetchall()

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        return self._connection.execute(statement, values).rowcount

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        self._connection.executemany(statement, rows)

    def begin(self, run: str | None) -> None:
        # A deleted file still takes writes, and what it takes is lost.
        if _file_of(self._path) != self._file:
            raise LedgerLost(
                f"the ledger {self.name} was deleted or replaced while it was in use: restore it from a checkpoint"
            )
        self._connection.execute("BEGIN" if run is None else "BEGIN IMMEDIATE")

    def commit(self) -> None:
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        # SQLite has ended the transaction itself after some disk errors.
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def is_full(self, error: Exception) -> bool:
        return isinstance(error, sqlite3.Error) and getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"

    def close(self) -> None:
        self._connection.close()


def _file_of(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one of the same name; None where there is none."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino
