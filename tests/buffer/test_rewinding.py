"""What moves a run back: deletion below the watermark, rewinding to sample again, snapshots, the end, and who may do it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miles.buffer.backend import Where
from miles.buffer.callers import Call
from miles.buffer.ledger import Ledger, restore
from miles.errors import ExperienceError, LearnerFenced, LeaseLost, RunDirError
from miles.types import Group

from .stores import EVERY_STORE

pytestmark = EVERY_STORE
Open = Callable[..., Ledger]
Fill = Callable[..., list[int]]
Make = Callable[..., Group]


def trained(ledger: Ledger, fill: Fill, steps: int, start: int = 0) -> None:
    for version in range(start, steps):
        fill(ledger)
        assert ledger.create(version)
        ledger.advance(version + 1)


def test_everything_is_kept_unless_the_recipe_says_checkpoints(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2)
    trained(ledger, fill, 4)
    ledger.commit(3, "step_000003")
    assert ledger.stats().replayable_from == 0
    ledger.rewind(0)
    assert [group.ordinal for group in ledger.groups(0)] == [0, 1]


def test_bytes_of_groups_below_the_oldest_checkpoint_are_deleted(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2, keep="checkpoints")
    trained(ledger, fill, 5)
    ledger.commit(3, "step_000003")
    with pytest.raises(ExperienceError, match=r'ordinal 0 was deleted.*buffer\.keep is "checkpoints"'):
        ledger.groups(0)
    assert [group.ordinal for group in ledger.groups(3)] == [6, 7]
    assert ledger.verify() == 5


def test_sampling_again_collects_the_same_prompts_by_the_old_weights(
    open_ledger: Open, fill: Fill, make_group: Make
) -> None:
    ledger = open_ledger(2, max_staleness=1, num_rows=50)
    trained(ledger, fill, 2)
    held = ledger.lease(1, "w", 1e6)
    fill(ledger, drop=lambda ordinal: "solved_all" if ordinal % 2 else None)
    before = {step: ledger.manifest(step) for step in (0, 1)}
    ledger.rewind(1, "resample")
    stats = ledger.stats()
    assert (stats.weight_version, stats.next_step, stats.trained, stats.leased, stats.epoch) == (1, 1, 2, 0, 1)
    assert stats.pending == stats.issued - 2
    assert stats.drops_by_reason["older_epoch"] > 0
    with pytest.raises(LeaseLost):
        ledger.put(held[0], make_group(held[0].ordinal, held[0].ordinal))
    assert ledger.manifest(1) == []
    assert fill(ledger)[:2] == [2, 3]  # in order, nothing is skipped
    assert ledger.create(1) == [2, 3] == before[1]
    assert {group.version_min for group in ledger.groups(1)} == {1}
    ledger.advance(2)
    trained(ledger, fill, 4, start=2)
    assert ledger.verify() == 4
    placed = [ordinal for step in range(4) for ordinal in ledger.manifest(step)]
    assert placed == list(range(8))
    assert [summary.reason for summary in ledger.finished(1)] == [None, None]


def test_a_void_step_of_an_older_epoch_does_not_come_back(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(1)
    trained(ledger, fill, 4)
    ledger.rewind(3, "resample")
    fill(ledger, drop=lambda ordinal: "solved_all" if ordinal == 3 else None)
    fill(ledger)
    assert ledger.create(3) == [4]
    ledger.advance(4)
    ledger.rewind(1, "resample")
    assert [ledger.manifest(step) for step in range(4)] == [[0], [], [], []]
    trained(ledger, fill, 5, start=1)
    assert [ledger.manifest(step) for step in range(5)] == [[0], [1], [2], [3], [4]]
    assert ledger.stats().steps[3].dropped == 0
    assert ledger.verify() == 5


def test_a_learner_that_was_taken_over_is_fenced(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(1)
    fill(ledger)
    assert ledger.create(0, "old") == [0]
    with pytest.raises(LearnerFenced, match="another learner"):
        ledger.create(0, "new")
    ledger.rewind(0, "replay", Call("new", 1))
    assert ledger.create(0, "new") == [0]
    for call in (
        lambda: ledger.create(0, "old"),
        lambda: ledger.advance(1, "old"),
        lambda: ledger.commit(0, "step_000000", "old"),
        lambda: ledger.end("done", "old"),
    ):
        with pytest.raises(LearnerFenced):
            call()
    ledger.advance(1, "new")


def test_a_rewind_that_is_repeated_or_late_changes_nothing(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(1)
    trained(ledger, fill, 2)
    ledger.rewind(1, "resample", Call("a", 1))
    ledger.rewind(1, "resample", Call("a", 1))
    assert ledger.stats().epoch == 1
    ledger.rewind(0, "resample", Call("b", 1))
    with pytest.raises(LearnerFenced, match="was taken over"):
        ledger.rewind(1, "resample", Call("a", 1))
    assert (ledger.stats().epoch, ledger.stats().weight_version) == (2, 0)


def test_a_lease_call_that_is_repeated_gets_the_same_leases(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(4)
    first = ledger.lease(2, "w", 60.0, Call("s", 1))
    assert ledger.lease(2, "w", 60.0, Call("s", 1)) == first
    ledger.put(first[0], make_group(0, 0))
    assert ledger.lease(2, "w", 60.0, Call("s", 1)) == first[1:]
    second = ledger.lease(2, "w", 60.0, Call("s", 2))
    assert [lease.ordinal for lease in second] == [2, 3]
    with pytest.raises(ExperienceError, match="call 1 of session s comes after call 2"):
        ledger.lease(2, "w", 60.0, Call("s", 1))
    assert ledger.lease(2, "w", 60.0, Call("s", 3)) == []
    ledger.release(second[0])
    assert [lease.ordinal for lease in ledger.lease(2, "w", 60.0, Call("s", 3))] == [
        2
    ]  # nothing was given for it before


def test_a_lost_ledger_is_made_again_from_a_snapshot(
    open_ledger: Open, fill: Fill, tmp_path: Path, where: Callable[..., Where]
) -> None:
    ledger = open_ledger(2, max_staleness=2, num_rows=20, shuffle=True)
    trained(ledger, fill, 3)
    fill(ledger)
    saved = b"".join(ledger.snapshot())
    rows = [[group.row for group in ledger.groups(step)] for step in range(3)]
    trained(ledger, fill, 5, start=3)
    assert len(saved) < 10_000
    ledger.close()
    folder = tmp_path / "again"
    folder.mkdir()
    restore(folder, saved, where=where(folder))
    again = open_ledger(2, max_staleness=2, num_rows=20, shuffle=True, folder=folder, resume=True)
    again.rewind(3, "resample")
    assert again.stats().trained == 6
    trained(again, fill, 10, start=3)
    rows += [[group.row for group in again.groups(step)] for step in range(3, 10)]
    assert sorted(row for step in rows for row in step) == list(range(20))  # 0 skipped, 0 twice
    assert again.verify() == 10
    assert [event.kind for event in again.events()][:3] == ["created", "restored", "rewind"]
    with pytest.raises(RunDirError, match=r"in use|holds the run"):
        restore(folder, saved, where=where(folder))


@pytest.mark.parametrize("damage", ["cut", "flipped", "longer", "other"])
def test_a_damaged_snapshot_is_refused(
    open_ledger: Open, fill: Fill, tmp_path: Path, damage: str, where: Callable[..., Where]
) -> None:
    ledger = open_ledger(2)
    trained(ledger, fill, 2)
    saved = b"".join(ledger.snapshot())
    middle = len(saved) // 2
    saved = {
        "cut": saved[:middle],
        "flipped": saved[:middle] + bytes([saved[middle] ^ 1]) + saved[middle + 1 :],
        "longer": saved + b"x",
        "other": b"\x80\x04\x95cos\nsystem\n",
    }[damage]
    folder = tmp_path / "again"
    folder.mkdir()
    with pytest.raises(ExperienceError, match="cut or altered"):
        restore(folder, saved, where=where(folder))
    assert open_ledger(2, folder=folder).stats().issued == 0  # nothing of it stayed


def test_after_the_end_nothing_is_leased_until_a_rewind(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2)
    trained(ledger, fill, 1)
    ledger.end("the learner is done")
    ledger.end("twice is once")
    assert fill(ledger) == []
    assert ledger.waiting() == 0
    assert ledger.stats().ended == "the learner is done"
    ledger.rewind(1)
    assert fill(ledger) == [2, 3]
