"""Opening, reading and checking a ledger: whose it is, what it holds, what was altered."""

from __future__ import annotations

import dataclasses
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from miles.buffer.ledger import Ledger, LedgerReader
from miles.buffer.reading import StepStats
from miles.buffer.segments import Segments
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.errors import ConfigError, ExperienceError, GroupRefused, RunDirError
from miles.types import Collected, Group, Lease

Open = Callable[..., Ledger]
Fill = Callable[..., list[int]]


def trained(ledger: Ledger, fill: Fill, steps: int) -> None:
    for version in range(steps):
        fill(ledger)
        assert ledger.create(version)
        ledger.advance(version + 1)


def test_importing_the_buffer_loads_no_torch() -> None:
    program = "import sys, miles.buffer.embedded; print('torch' in sys.modules, 'transformers' in sys.modules, 'pickle' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout
    assert output.split() == [b"False", b"False", b"False"]


def test_a_commit_is_synced_before_it_is_acknowledged(open_ledger: Open) -> None:
    db = open_ledger()._store.db
    assert db.query("PRAGMA journal_mode")[0][0] == "wal"
    assert db.query("PRAGMA synchronous")[0][0] == 2  # FULL


def test_the_file_opens_as_plain_sqlite(open_ledger: Open, fill: Fill, tmp_path: Path) -> None:
    ledger = open_ledger()
    trained(ledger, fill, 2)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        rows = db.execute("SELECT step, pos, ordinal FROM manifest ORDER BY step, pos").fetchall()
    db.close()
    assert tables == {"run", "prompt", "grp", "manifest", "step", "dropped", "quarantine", "caller", "event"}
    assert rows == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def test_a_used_directory_is_not_started_in_again(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger()
    trained(ledger, fill, 3)
    ledger.close()
    with pytest.raises(RunDirError, match="already holds a run: continue it with --resume"):
        open_ledger()
    again = open_ledger(resume=True)
    assert again.stats().weight_version == 3
    assert [event.kind for event in again.events()] == ["created"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"identity": {"config": "d"}}, "config is 'c' there and 'd' here"),
        ({"identity": {"config": "c", "more": 1}}, "more is None there and 1 here"),
        ({"num_rows": 5}, "rows of the data is 100 there and 5 here"),
        ({"seed": 1}, r"run\.seed is 0 there and 1 here"),
        (
            {"epochs": 2, "max_staleness": 1},
            r"buffer\.max_staleness is 0 there and 1 here; data\.epochs is None there and 2",
        ),
    ],
)
def test_another_run_is_refused_by_what_differs(open_ledger: Open, keys: dict, message: str) -> None:
    open_ledger().close()
    with pytest.raises(
        RunDirError, match=rf"holds another run: {message}.*\. Continue it with the recipe in .*config\.toml"
    ):
        open_ledger(resume=True, **keys)
    assert open_ledger(resume=True).stats().issued == 0  # what refuses holds no lock


def test_one_process_at_a_time(open_ledger: Open) -> None:
    open_ledger()
    with pytest.raises(RunDirError, match="is in use by process"):
        open_ledger(resume=True)


def test_files_that_are_no_ledger(open_ledger: Open, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database at all" * 100)
    with pytest.raises(RunDirError, match="is not a ledger"):
        open_ledger()
    assert path.read_bytes().startswith(b"not a database")
    path.unlink()
    foreign = sqlite3.connect(path)
    foreign.execute("CREATE TABLE mine (x)")
    foreign.close()
    with pytest.raises(RunDirError, match="is a database of another program"):
        open_ledger()


def test_another_schema_version_is_refused(open_ledger: Open, tmp_path: Path) -> None:
    open_ledger().close()
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(RunDirError, match="has schema version 99, this version of Miles uses 3"):
        open_ledger(resume=True)


def test_an_empty_file_becomes_a_ledger(open_ledger: Open, tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").touch()
    assert open_ledger().stats().issued == 0


def test_a_ledger_that_cannot_be_opened(tmp_path: Path, open_ledger: Open) -> None:
    (tmp_path / "ledger.sqlite").mkdir()
    with pytest.raises(ExperienceError, match=r"could not be opened .*free space on the disk, or put a copy back"):
        open_ledger()


def test_names_are_plain(tmp_path: Path) -> None:
    with pytest.raises(ExperienceError, match=r"the run's name '\.\./x' must match"):
        Ledger(tmp_path, LedgerSettings(1), PromptStream(1, 0, False, 1), {}, run="../x")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"groups_per_step": 0}, r"algorithm\.groups_per_step is 0"),
        ({"groups_per_step": 1, "max_staleness": -1}, r"buffer\.max_staleness is -1"),
        ({"groups_per_step": 1, "max_attempts": 0}, r"buffer\.max_attempts is 0"),
        ({"groups_per_step": 1, "max_dropped": 0}, r"rollout\.max_dropped is 0: it must be at least 1"),
    ],
)
def test_settings_that_cannot_work(keys: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LedgerSettings(**keys)


def test_default_drop_limit() -> None:
    assert LedgerSettings(8).drop_limit == 80
    assert LedgerSettings(8, max_dropped=3).drop_limit == 3


def test_groups_come_back_inline_and_from_segments(
    open_ledger: Open, make_group: Callable[..., Group], tmp_path: Path
) -> None:
    ledger = open_ledger(4, inline_bytes=2000, segment_bytes=5000)
    leases = ledger.lease(4, "w", 60.0)
    groups = [make_group(ordinal, ordinal, length=length) for ordinal, length in enumerate((3, 300, 4, 301))]
    assert [ledger.put(lease, group) for lease, group in zip(leases, groups, strict=True)] == [True] * 4
    inline = [
        row["segment"] is None for row in ledger._store.all("SELECT segment FROM grp WHERE run = ? ORDER BY ordinal")
    ]
    assert inline == [True, False, True, False]
    ledger.create(0)
    assert ledger.groups(0) == groups
    ledger.close()
    reader = LedgerReader(tmp_path)
    assert reader.groups(0) == groups
    assert reader.group(1) == groups[1]
    assert reader.verify() == 1
    reader.close()


def test_a_group_whose_bytes_cannot_be_synced_is_not_stored(
    open_ledger: Open, make_group: Callable[..., Group], tmp_path: Path
) -> None:
    class Unsynced(Segments):
        fired = 0

        def sync(self) -> None:
            self.fired += 1
            raise OSError("Input/output error")

    ledger = open_ledger(2, inline_bytes=100)
    first, second = ledger.lease(2, "w", 60.0)
    whole, ledger._store.payloads = ledger._store.payloads, Unsynced(tmp_path / "segments")
    for call in (lambda: ledger.put(first, make_group(0, 0)), lambda: ledger.drop(second, "short", make_group(1, 1))):
        with pytest.raises(ExperienceError, match=r"\(Input/output error\): nothing that it had acknowledged is lost"):
            call()
    assert ledger._store.payloads.fired == 2
    assert (ledger.stats().leased, ledger.stats().ready, ledger.stats().dropped) == (2, 0, 0)
    ledger._store.payloads.close()
    ledger._store.payloads = whole
    assert ledger.put(first, make_group(0, 0)) is True
    assert ledger.group(0) == make_group(0, 0)


def test_threads_share_commits_and_one_that_is_refused_hinders_no_other(
    open_ledger: Open, make_group: Callable[..., Group]
) -> None:
    ledger = open_ledger(16)
    commits = 0
    commit = ledger._store.db.commit

    def slow_commit() -> None:
        nonlocal commits
        commits += 1
        time.sleep(0.02)
        commit()

    leases = ledger.lease(16, "w", 60.0)
    ledger._store.db.commit = slow_commit  # type: ignore[method-assign]

    def put(lease: Lease) -> object:
        try:
            return ledger.put(lease, make_group(lease.ordinal, lease.ordinal if lease.ordinal % 4 else 99))
        except GroupRefused as refused:
            return refused.reason

    with ThreadPoolExecutor(16) as threads:
        outcomes = list(threads.map(put, leases))
    assert outcomes == ["row", True, True, True] * 4
    assert commits < 16  # 12 groups and 4 rows of the quarantine would be 20, one by one
    assert (ledger.stats().ready, ledger.stats().refused) == (12, 4)
    assert [group.ordinal for group in map(ledger.group, range(1, 4))] == [1, 2, 3]


def test_a_failing_commit_is_an_error_to_all_who_share_it(open_ledger: Open, make_group: Callable[..., Group]) -> None:
    ledger = open_ledger(4)
    leases = ledger.lease(4, "w", 60.0)
    commit = ledger._store.db.commit

    def failing() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    def put(lease: Lease) -> object:
        try:
            return ledger.put(lease, make_group(lease.ordinal, lease.ordinal))
        except ExperienceError as error:
            return str(error)

    ledger._store.db.commit = failing  # type: ignore[method-assign]
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(put, leases))
    assert all("disk I/O error" in str(outcome) for outcome in outcomes)
    ledger._store.db.commit = commit  # type: ignore[method-assign]
    assert ledger.stats().ready == 0
    assert [put(lease) for lease in leases] == [True] * 4


def test_a_reader_beside_a_writer_and_of_a_dead_run(open_ledger: Open, fill: Fill, tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="holds no run, or one that has not started"):
        LedgerReader(tmp_path)
    ledger = open_ledger(2, max_staleness=1)
    with pytest.raises(RunDirError, match="holds no run named 'other'"):
        LedgerReader(tmp_path, run="other")
    reader = LedgerReader(tmp_path)
    trained(ledger, fill, 3)
    assert reader.stats() == ledger.stats()
    assert reader.finished(1) == ledger.finished(1)
    assert reader.manifest(1) == [2, 3]
    assert reader.manifest(9) == []
    with pytest.raises(ExperienceError, match="has no manifest for version 9"):
        reader.groups(9)
    with pytest.raises(ExperienceError, match="holds no group for ordinal 99"):
        reader.group(99)
    with pytest.raises(ExperienceError, match="readonly"):
        reader._store.write(lambda: reader._store.event(0.0, "kind", {}))
    ledger.close()
    assert reader.stats().trained == 6
    reader.close()


def test_an_empty_file_is_no_run_to_read(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").touch()
    with pytest.raises(RunDirError, match="holds no run yet"):
        LedgerReader(tmp_path)


def test_a_damaged_ledger_is_an_error_to_readers_too(tmp_path: Path, open_ledger: Open) -> None:
    open_ledger().close()
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 4096)
    with pytest.raises(ExperienceError, match=r"could not be (opened|read or written) .*(malformed|schema)"):
        LedgerReader(tmp_path)


def test_the_identity_and_why_a_step_is_short_can_be_read(open_ledger: Open, fill: Fill, tmp_path: Path) -> None:
    ledger = open_ledger(2, num_rows=3, epochs=1, identity={"config": "c", "rows": "r"})
    while ledger.waiting():
        fill(ledger)
        version = ledger.stats().weight_version
        ledger.create(version)
        ledger.advance(version + 1)
    reader = LedgerReader(tmp_path)
    identity = reader.identity()
    assert (identity["config"], identity["rows"], identity["rows of the data"]) == ("c", "r", 3)
    assert [reader.short(version) for version in (0, 1, 2)] == [None, "stream_ended", None]
    reader.close()


def test_stats_and_events(
    open_ledger: Open, fill: Fill, make_group: Callable[..., Group], clock: Callable[[], float]
) -> None:
    ledger = open_ledger(2, max_staleness=1)
    fill(ledger, drop=lambda ordinal: "solved_all: every answer right" if ordinal == 1 else None)
    (freed,) = ledger.lease(1, "w", 60.0)  # the place of the dropped one
    ledger.put(freed, make_group(4, 4))
    assert ledger.create(0) == [0, 2]
    ledger.advance(1)
    ledger.lease(1, "w", 60.0)
    assert ledger.create(1) == [3, 4]
    ledger.commit(1, Path("checkpoints/step_000001"))
    stats = ledger.stats()
    assert (stats.weight_version, stats.next_step, stats.committed, stats.capacity) == (1, 2, 1, 4)
    assert (stats.issued, stats.trained, stats.dropped, stats.pending, stats.leased, stats.ready) == (6, 2, 1, 0, 1, 2)
    assert stats.drops_by_reason == {"solved_all": 1}
    assert stats.steps == (
        StepStats(step=0, groups=2, dropped=1, short=None, staleness_mean=0.0, staleness_max=0),
        StepStats(step=1, groups=2, dropped=0, short=None, staleness_mean=1.0, staleness_max=1),
    )
    assert [(event.kind, event.detail) for event in ledger.events()] == [
        ("created", {}),
        ("commit", {"version": 1, "checkpoint": "step_000001"}),
    ]
    assert {event.time for event in ledger.events()} == {clock()}


def test_who_collected_what_and_when(open_ledger: Open, make_group: Callable[..., Group], clock: Any) -> None:
    ledger = open_ledger(2, max_staleness=1)
    first, lost, third = ledger.lease(3, "ann", 10.0)
    clock.now += 2.0
    ledger.put(first, make_group(0, 0))
    ledger.drop(third, "solved_all: every answer right")
    clock.now += 10.0
    (again,) = ledger.lease(1, "bob", 60.0)
    assert again.ordinal == lost.ordinal
    clock.now += 1.0
    ledger.put(again, make_group(1, 1))
    assert ledger.create(0) == [0, 1]
    assert ledger.collected(0) == [
        Collected(0, "ann", 1000.0, 1002.0, None),
        Collected(1, "bob", 1012.0, 1013.0, None),
        Collected(2, "ann", 1000.0, 1002.0, "solved_all"),
    ]
    assert ledger.collected(1) == []


def work_of_a_step(ledger: Ledger, fill: Fill, version: int) -> int:
    """Instructions of SQLite's machine, in hundreds, for a step: lease, put, create, take back, advance."""
    count = 0

    def one_more() -> int:
        nonlocal count
        count += 1
        return 0

    connection = ledger._store.db._connection
    connection.set_progress_handler(one_more, 100)
    fill(ledger)
    assert ledger.create(version)
    ledger.advance(version + 1)
    connection.set_progress_handler(None, 0)
    return count


def test_a_step_costs_the_same_after_a_long_history(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(8, num_rows=50)
    trained(ledger, fill, 4)
    short = work_of_a_step(ledger, fill, 4)
    state = ledger._store.state()
    past = ((-number, 0) for number in range(1, 50_000))  # as if as many more had been trained before
    ledger._store.db.executemany(
        "INSERT INTO prompt (run, ordinal, row, state, attempts, step) VALUES ('local', ?, 0, 'trained', 1, ?)", past
    )
    assert work_of_a_step(ledger, fill, state.weight_version) <= 1.2 * short


def test_an_altered_payload_is_found(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger()
    trained(ledger, fill, 2)
    assert ledger.verify() == 2
    payload = bytearray(ledger._store.payload(2).payload)
    payload[-1] ^= 1
    ledger._store.db.execute("UPDATE grp SET payload = ? WHERE ordinal = 2", (bytes(payload),))
    with pytest.raises(ExperienceError, match=r"ordinal 2 of the ledger .* was altered on the disk.*altered or cut"):
        ledger.groups(1)
    with pytest.raises(ExperienceError, match="ordinal 2"):
        ledger.verify()


def test_a_manifest_cannot_be_changed_and_an_altered_chain_is_found(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger()
    trained(ledger, fill, 3)
    db = ledger._store.db
    for statement in (
        "UPDATE manifest SET pos = pos + 10",
        "DELETE FROM manifest",
        "UPDATE step SET short = 'x'",
        "DELETE FROM step",
    ):
        with pytest.raises(sqlite3.IntegrityError, match="never changes"):
            db.execute(statement)
    db.execute("DROP TRIGGER manifest_is_immutable")
    db.execute("UPDATE manifest SET hash = 'other' WHERE ordinal = 2")
    with pytest.raises(ExperienceError, match=r"the manifest of step 1 in .* was altered"):
        ledger.verify()


def test_several_threads_share_a_ledger(open_ledger: Open, make_group: Callable[..., Group]) -> None:
    ledger = open_ledger(64)
    problems: list[BaseException] = []

    def collect(worker: str) -> None:
        try:
            while leases := ledger.lease(3, worker, 60.0):
                for lease in leases:
                    ledger.put(lease, make_group(lease.ordinal, lease.ordinal))
                    ledger.stats()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=collect, args=(f"w{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert ledger.create(0) == list(range(64))


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LedgerSettings(1).groups_per_step = 2  # type: ignore[misc]
