"""PostgreSQL under the ledger: several buffer processes serve one run, and any of them may die."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

try:
    import psycopg
except ImportError as error:
    from miles.errors import BadInput

    raise BadInput("a ledger in PostgreSQL needs psycopg: pip install 'miles-rl[postgres]'") from error

from miles.buffer.schema import SCHEMA_VERSION, TABLES
from miles.errors import BadInput, ExperienceError, LedgerUnreachable

CONNECT_S = 10
IDLE_S = 120
ENDED = ("25P03", "57P01", "57P02", "57P03", "57P05")
"""States of errors after which the server closes the connection, which may be noticed later than the error."""
MAKING_TABLES = 0x4D694C65  # key of the lock under which tables are made
NEVER_CHANGES = """
CREATE FUNCTION never_changes() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'a % never changes', TG_TABLE_NAME; END $$;
CREATE TRIGGER manifest_is_immutable BEFORE UPDATE OR DELETE ON manifest FOR EACH ROW EXECUTE FUNCTION never_changes();
CREATE TRIGGER step_is_immutable BEFORE UPDATE OR DELETE ON step FOR EACH ROW EXECUTE FUNCTION never_changes();
"""


class Row(tuple[Any, ...]):
    """A row of an answer, by name or by place."""

    names: dict[str, int]

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(self.names[key] if isinstance(key, str) else key)


def _rows(cursor: Any) -> Any:
    names = {column.name: place for place, column in enumerate(cursor.description or ())}
    kind = type("NamedRow", (Row,), {"names": names})
    return kind


@functools.cache
def translated(statement: str) -> str:
    """The statement with psycopg's marks for values."""
    return statement.replace("%", "%%").replace("?", "%s")


def _ddl(statement: str) -> str:
    statement = statement.replace("WITHOUT ROWID", "").replace("BLOB", "BYTEA")
    return statement.replace("seq INTEGER PRIMARY KEY", "seq BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY")


class PostgresDatabase:
    """A connection that is made again when the server comes back. Writers of one run wait for each other."""

    errors = (psycopg.Error,)
    shared = True

    def __init__(self, url: str, idle_s: int = IDLE_S) -> None:
        """`url`: postgresql://USER@HOST/DATABASE. `idle_s`: a process that freezes inside a transaction, with the run's lock,
        loses its connection after so many seconds.

        Raises BadInput for another address, LedgerUnreachable, and ExperienceError where the database cannot be used.
        """
        try:
            parts = psycopg.conninfo.conninfo_to_dict(url)
        except psycopg.Error as error:
            raise BadInput(f"buffer.ledger cannot be read as the address of a PostgreSQL server: {error}") from error
        self.name = f"postgresql://{parts.get('host', '')}/{parts.get('dbname', '')}"
        self._url = url
        self._idle_s = idle_s
        self._connection = self._connect()

    def _connect(self) -> psycopg.Connection[Any]:
        try:
            connection = psycopg.connect(self._url, autocommit=True, row_factory=_rows, connect_timeout=CONNECT_S)
        except psycopg.OperationalError as error:
            raise self._unreachable(error) from error
        try:
            with self._lost(connection):
                connection.execute("SET synchronous_commit = on")
                connection.execute("SET statement_timeout = 0")
                connection.execute(f"SET idle_in_transaction_session_timeout = '{self._idle_s}s'")
                self._make_tables(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _make_tables(self, connection: psycopg.Connection[Any]) -> None:
        with connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (MAKING_TABLES,))
            if connection.execute("SELECT to_regclass('miles_ledger')").fetchone()[0] is not None:
                version = connection.execute("SELECT version FROM miles_ledger").fetchone()[0]
                if version != SCHEMA_VERSION:
                    raise ExperienceError(
                        f"{self.name} has schema version {version}, this version of Miles uses {SCHEMA_VERSION}: use another database"
                    )
                return
            for statement in TABLES:
                connection.execute(_ddl(statement))
            connection.execute(NEVER_CHANGES)
            connection.execute("CREATE TABLE miles_ledger (version BIGINT NOT NULL)")
            connection.execute("INSERT INTO miles_ledger VALUES (%s)", (SCHEMA_VERSION,))

    def query(self, statement: str, values: Sequence[Any] = ()) -> Sequence[Any]:
        with self._lost():
            return self._connection.execute(translated(statement), values).fetchall()

    def execute(self, statement: str, values: Sequence[Any] = ()) -> int:
        with self._lost():
            return self._connection.execute(translated(statement), values).rowcount

    def executemany(self, statement: str, rows: Iterable[Sequence[Any]]) -> None:
        with self._lost(), self._connection.cursor() as cursor:
            cursor.executemany(translated(statement), list(rows))

    def begin(self, run: str | None) -> None:
        try:
            self._begin(run)
        except LedgerUnreachable:  # nothing has been done yet, so a new connection is as good
            self._connection = self._connect()
            self._begin(run)

    def _begin(self, run: str | None) -> None:
        if run is None:
            self.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            return
        self.execute("BEGIN")
        self.query("SELECT pg_advisory_xact_lock(hashtextextended(?, 0))", (run,))

    def commit(self) -> None:
        self.execute("COMMIT")

    def rollback(self) -> None:
        if (
            not self._connection.closed
            and self._connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE
        ):
            self.execute("ROLLBACK")

    def is_full(self, error: Exception) -> bool:
        return isinstance(error, psycopg.errors.DiskFull)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _lost(self, connection: psycopg.Connection[Any] | None = None) -> Iterator[None]:
        """Raises LedgerUnreachable where there is no connection: a call may be made again then, whatever became of it."""
        connection = connection or self._connection
        try:
            yield
        except psycopg.Error as error:
            if not connection.closed and error.sqlstate not in ENDED:
                raise
            connection.close()
            raise self._unreachable(error) from error

    def _unreachable(self, error: psycopg.Error) -> LedgerUnreachable:
        said = re.sub(r"\s+", " ", str(error))
        return LedgerUnreachable(f"the ledger {self.name} cannot be reached: {said}")
