"""What is deleted with `buffer.keep` = "checkpoints" leaves the disk: segment files, and pages of the ledger's own file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miles.buffer.ledger import Ledger
from miles.errors import ExperienceError

Open = Callable[..., Ledger]
Fill = Callable[..., list[int]]


def trained(ledger: Ledger, fill: Fill, steps: int, start: int = 0) -> None:
    for version in range(start, steps):
        fill(ledger)
        assert ledger.create(version)
        ledger.advance(version + 1)


def test_groups_below_the_oldest_checkpoint_are_deleted(open_ledger: Open, fill: Fill, tmp_path: Path) -> None:
    ledger = open_ledger(2, keep="checkpoints", inline_bytes=0, segment_bytes=1)
    trained(ledger, fill, 5)
    whole = len(list((tmp_path / "segments").iterdir()))
    ledger.commit(3, "step_000003")
    assert len(list((tmp_path / "segments").iterdir())) == whole - 6
    with pytest.raises(ExperienceError, match=r'ordinal 0 was deleted.*buffer\.keep is "checkpoints"'):
        ledger.groups(0)
    assert [group.ordinal for group in ledger.groups(3)] == [6, 7]
    assert [summary.ordinal for summary in ledger.finished(0)] == [0, 1]  # what metrics need stays
    assert ledger.stats().replayable_from == 3
    assert ledger.verify() == 5
    with pytest.raises(ExperienceError, match="replay starts from version 3 at the earliest"):
        ledger.rewind(2)
    ledger.rewind(3)
    assert ledger.create(3) == [6, 7]


def test_deleting_is_finished_by_the_next_commit_after_a_crash(open_ledger: Open, fill: Fill, tmp_path: Path) -> None:
    ledger = open_ledger(1, keep="checkpoints", inline_bytes=0, segment_bytes=1)
    trained(ledger, fill, 3)
    ledger._store.write(lambda: ledger._rewinding.commit(2, "step_000002"))  # the process ends before it tidies up
    assert len(list((tmp_path / "segments").iterdir())) == 3
    ledger.commit(2, "step_000002")
    assert len(list((tmp_path / "segments").iterdir())) == 1


def test_the_disk_stays_bounded_when_inline_groups_are_deleted(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(4, keep="checkpoints")

    def pages() -> int:
        return ledger._store.db.query("PRAGMA page_count")[0][0] - ledger._store.db.query("PRAGMA freelist_count")[0][0]

    def payloads() -> int:
        return ledger._store.value("SELECT count(payload) FROM grp WHERE run = ?")

    trained(ledger, fill, 10)
    for version in range(10, 30):
        ledger.commit(version, f"step_{version}")
        trained(ledger, fill, version + 1, start=version)
        assert payloads() == 4
    assert pages() < 200
