"""What PostgreSQL under the ledger does beyond the store's contract: addresses, other versions, servers and holders that are gone."""

from __future__ import annotations

import psycopg
import pytest

from miles.buffer.postgres import PostgresDatabase
from miles.errors import BadInput, ExperienceError, LedgerUnreachable

from .programs import Postgres, free_port

pytestmark = pytest.mark.slow


def test_an_address_that_is_none_and_a_server_that_is_not_there() -> None:
    with pytest.raises(BadInput, match=r"buffer\.ledger cannot be read as the address of a PostgreSQL server"):
        PostgresDatabase("postgresql://[")
    with pytest.raises(LedgerUnreachable, match=r"postgresql://127\.0\.0\.1/none cannot be reached: .*refused"):
        PostgresDatabase(f"postgresql://miles:secret@127.0.0.1:{free_port()}/none")


def test_a_password_is_in_no_name(postgres: Postgres) -> None:
    url = postgres.database().replace("miles@", "miles:secret@")
    database = PostgresDatabase(url)
    assert "secret" not in database.name
    database.close()


def test_another_schema_version_is_refused(postgres: Postgres) -> None:
    url = postgres.database()
    PostgresDatabase(url).close()
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE miles_ledger SET version = 99")
    with pytest.raises(ExperienceError, match="has schema version 99, this version of Miles uses"):
        PostgresDatabase(url)


def test_manifests_never_change(postgres: Postgres) -> None:
    database = PostgresDatabase(postgres.database())
    database.execute("INSERT INTO step VALUES ('r', 0, 0, 0, 'a', 'b', NULL)")
    for statement in ("UPDATE step SET manifest_hash = 'c'", "DELETE FROM step"):
        with pytest.raises(psycopg.errors.RaiseException, match="a step never changes"):
            database.execute(statement)
    database.close()


def test_who_freezes_with_the_lock_loses_it(postgres: Postgres) -> None:
    url = postgres.database()
    frozen, other = PostgresDatabase(url, idle_s=1), PostgresDatabase(url)
    frozen.begin("run")
    other.begin("run")  # waits for the frozen one's connection to be ended
    other.commit()
    with pytest.raises(LedgerUnreachable):
        frozen.execute("SELECT 1")
    frozen.begin("run")  # by a new connection
    frozen.rollback()
    for database in (frozen, other):
        database.close()


def test_a_session_that_the_server_ends_is_made_again(postgres: Postgres) -> None:
    url = postgres.database()
    ended, other = PostgresDatabase(url), PostgresDatabase(url)
    for _ in range(20):  # the end of the connection may be seen with the error or after it
        ended.begin("run")
        pid = ended.query("SELECT pg_backend_pid()")[0][0]
        other.query("SELECT pg_terminate_backend(?)", (pid,))
        with pytest.raises(LedgerUnreachable):
            ended.execute("SELECT 1")
        ended.rollback()
    for database in (ended, other):
        database.close()
