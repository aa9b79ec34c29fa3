"""The ledger's tables, and how a connection to them is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from miles.errors import RunDirError

LEDGER_NAME = "ledger.sqlite"
SEGMENTS_NAME = "segments"
SCHEMA_VERSION = 3
APPLICATION_ID = 0x4D694C65

TABLES = (
    """CREATE TABLE run (
  id TEXT PRIMARY KEY, config_hash TEXT NOT NULL, identity TEXT NOT NULL, setup TEXT NOT NULL, facts TEXT NOT NULL,
  max_stale BIGINT NOT NULL, groups_per_step BIGINT NOT NULL,
  next_ordinal BIGINT NOT NULL, next_step BIGINT NOT NULL, committed_step BIGINT NOT NULL,
  weight_version BIGINT NOT NULL, epoch BIGINT NOT NULL, kept_from BIGINT NOT NULL, learner TEXT,
  stored BIGINT NOT NULL, refused BIGINT NOT NULL, ended TEXT, created DOUBLE PRECISION NOT NULL)""",
    """CREATE TABLE prompt (
  run TEXT NOT NULL, ordinal BIGINT NOT NULL, row BIGINT NOT NULL,
  state TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'done', 'placed', 'trained', 'dropped')),
  lease_id TEXT, worker TEXT, call TEXT, lease_expires DOUBLE PRECISION, lease_ttl DOUBLE PRECISION, min_version BIGINT,
  attempts BIGINT NOT NULL, step BIGINT, leased DOUBLE PRECISION, finished DOUBLE PRECISION,
  PRIMARY KEY (run, ordinal)) WITHOUT ROWID""",
    "CREATE INDEX prompt_state ON prompt (run, state, ordinal)",
    """CREATE TABLE grp (
  run TEXT NOT NULL, ordinal BIGINT NOT NULL,
  version_min BIGINT NOT NULL, version_max BIGINT NOT NULL, n BIGINT NOT NULL, reward_mean DOUBLE PRECISION,
  reward_std DOUBLE PRECISION, step BIGINT, segment BIGINT, "offset" BIGINT, object TEXT, length BIGINT NOT NULL,
  hash TEXT NOT NULL, meta TEXT NOT NULL, payload BLOB,
  PRIMARY KEY (run, ordinal))""",
    "CREATE INDEX grp_segment ON grp (run, segment) WHERE segment IS NOT NULL",
    """CREATE TABLE manifest (
  run TEXT NOT NULL, epoch BIGINT NOT NULL, step BIGINT NOT NULL, pos BIGINT NOT NULL, ordinal BIGINT NOT NULL,
  version_min BIGINT NOT NULL, hash TEXT NOT NULL,
  PRIMARY KEY (run, step, epoch, pos), UNIQUE (run, epoch, ordinal)) WITHOUT ROWID""",
    """CREATE TABLE step (
  run TEXT NOT NULL, epoch BIGINT NOT NULL, step BIGINT NOT NULL, weight_version BIGINT NOT NULL,
  manifest_hash TEXT NOT NULL, prev_hash TEXT NOT NULL, short TEXT,
  PRIMARY KEY (run, step, epoch)) WITHOUT ROWID""",
    """CREATE TABLE dropped (
  run TEXT NOT NULL, epoch BIGINT NOT NULL, ordinal BIGINT NOT NULL, step BIGINT NOT NULL, reason TEXT NOT NULL,
  detail TEXT, summary TEXT,
  PRIMARY KEY (run, ordinal, epoch)) WITHOUT ROWID""",
    "CREATE INDEX dropped_step ON dropped (run, step)",
    """CREATE TABLE quarantine (
  run TEXT NOT NULL, lease_id TEXT NOT NULL, hash TEXT NOT NULL, time DOUBLE PRECISION NOT NULL, ordinal BIGINT NOT NULL,
  worker TEXT, reason TEXT NOT NULL, detail TEXT NOT NULL, payload BLOB,
  PRIMARY KEY (run, lease_id, hash)) WITHOUT ROWID""",
    """CREATE TABLE caller (
  run TEXT NOT NULL, session TEXT NOT NULL, number BIGINT NOT NULL, time DOUBLE PRECISION NOT NULL,
  PRIMARY KEY (run, session)) WITHOUT ROWID""",
    "CREATE TABLE event (seq INTEGER PRIMARY KEY, run TEXT NOT NULL, time DOUBLE PRECISION NOT NULL, kind TEXT NOT NULL, json TEXT NOT NULL)",
)
"""In the SQL that SQLite and PostgreSQL share, but for the words that `postgres.py` replaces."""

TRIGGERS = """
CREATE TRIGGER manifest_is_immutable BEFORE UPDATE ON manifest BEGIN SELECT RAISE(ABORT, 'a manifest never changes'); END;
CREATE TRIGGER manifest_is_kept BEFORE DELETE ON manifest BEGIN SELECT RAISE(ABORT, 'a manifest never changes'); END;
CREATE TRIGGER step_is_immutable BEFORE UPDATE ON step BEGIN SELECT RAISE(ABORT, 'a step never changes'); END;
CREATE TRIGGER step_is_kept BEFORE DELETE ON step BEGIN SELECT RAISE(ABORT, 'a step never changes'); END;
"""


def connect(path: Path) -> sqlite3.Connection:
    """The one connection that writes: WAL, every commit synced before it is acknowledged. Creates the tables.

    Raises RunDirError where the file is something else, and sqlite3.Error where the disk fails.
    """
    db = sqlite3.connect(path, isolation_level=None, timeout=10.0, check_same_thread=False)
    db.row_factory = sqlite3.Row
    try:
        if _version(db, path) == 0:
            # In the rollback journal's mode still, so a crash leaves either no table or all of them.
            db.executescript(
                f"BEGIN IMMEDIATE; {';'.join(TABLES)};{TRIGGERS} PRAGMA application_id = {APPLICATION_ID}; "
                f"PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
            )
        mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            raise RunDirError(
                f"{path} cannot use SQLite's write-ahead log (it stays in mode {mode}): choose a local disk"
            )
        db.execute("PRAGMA synchronous = FULL")
        db.execute("PRAGMA fullfsync = ON")
    except BaseException:
        db.close()
        raise
    return db


def connect_readonly(path: Path) -> sqlite3.Connection:
    """A connection that only reads, also beside a process that writes. Raises RunDirError where there is no ledger."""
    if not path.exists():
        raise RunDirError(f"{path} does not exist: the directory holds no run, or one that has not started")
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=10.0, check_same_thread=False)
    db.row_factory = sqlite3.Row
    try:
        if _version(db, path) == 0:
            raise RunDirError(f"{path} holds no run yet")
    except BaseException:
        db.close()
        raise
    return db


def _version(db: sqlite3.Connection, path: Path) -> int:
    """The schema version of the file; 0 for one without tables. Raises RunDirError where it is no ledger of this version."""
    try:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        application = db.execute("PRAGMA application_id").fetchone()[0]
        tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    except sqlite3.DatabaseError as error:
        if "not a database" not in str(error):
            raise
        raise RunDirError(f"{path} is not a ledger ({error}): choose another directory with --run") from error
    if tables == 0 and version == 0:
        return 0
    if application != APPLICATION_ID:
        raise RunDirError(f"{path} is a database of another program: choose another directory with --run")
    if version != SCHEMA_VERSION:
        raise RunDirError(
            f"{path} has schema version {version}, this version of Miles uses {SCHEMA_VERSION}: open it with the version "
            "that wrote it, or choose another directory with --run"
        )
    return version
