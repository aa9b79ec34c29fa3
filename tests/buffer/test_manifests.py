"""Manifests: ordinal order, immutability, the bound on staleness, short ones, and the ends of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miles.buffer.ledger import Ledger
from miles.errors import BufferClosed, ExperienceError, NothingToTrain
from miles.types import Group

from .stores import EVERY_STORE

pytestmark = EVERY_STORE
Open = Callable[..., Ledger]
Fill = Callable[..., list[int]]
Make = Callable[..., Group]


def test_a_slow_prompt_is_waited_for(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2, max_staleness=1)
    leases = ledger.lease(9, "w", 60.0)
    for lease in leases[1:]:
        ledger.put(lease, make_group(lease.ordinal, lease.ordinal))
    assert ledger.create(0) == []  # 1, 2 and 3 are done, 0 is not
    assert ledger.create(0) == []
    ledger.put(leases[0], make_group(0, 0))
    assert ledger.create(0) == [0, 1]
    assert ledger.create(0) == [0, 1]


def test_a_released_prompt_blocks_as_well(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)
    first, second = ledger.lease(9, "w", 60.0)
    ledger.put(second, make_group(1, 1))
    ledger.release(first)
    assert ledger.create(0) == []


def test_only_the_version_whose_turn_it_is_can_be_taken(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2)
    for version in (-1, 1, 7):
        with pytest.raises(ExperienceError, match=rf"take\({version}\): the learner has reached version 0"):
            ledger.create(version)
    with pytest.raises(
        ExperienceError, match=r"advance\(1\).*manifests 0 to -1 are taken.*only be 1, after its manifest"
    ):
        ledger.advance(1)
    fill(ledger)
    ledger.create(0)
    with pytest.raises(ExperienceError, match=r"advance\(2\)"):
        ledger.advance(2)
    ledger.advance(1)
    with pytest.raises(ExperienceError, match=r"advance\(-1\)"):
        ledger.advance(-1)
    with pytest.raises(ExperienceError, match=r"finished\(2\): only steps 0 to 1"):
        ledger.finished(2)


def test_advancing_again_is_a_replay_and_changes_nothing(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2)
    for version in range(3):
        fill(ledger)
        ledger.create(version)
        ledger.advance(version + 1)
    before = ledger.stats()
    ledger.rewind(1)
    assert [ledger.create(version) for version in (1, 2)] == [[2, 3], [4, 5]]
    ledger.advance(2)
    ledger.advance(3)
    assert ledger.stats() == before
    fill(ledger)
    assert ledger.create(3) == [6, 7]
    assert ledger.events()[-1].kind == "rewind"


def test_rewind_and_commit_above_the_ledger_are_refused(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2)
    fill(ledger)
    ledger.create(0)
    ledger.advance(1)
    for call in (ledger.rewind, lambda version: ledger.commit(version, Path("step_000005"))):
        with pytest.raises(ExperienceError, match=r"\(5\): the ledger .* stands at version 1.*of version 1 or below"):
            call(5)
    ledger.commit(1, Path("step_000001"))
    ledger.commit(0, Path("step_000000"))
    assert ledger.stats().committed == 1  # the watermark does not fall


def test_queue_time_counts_as_staleness(open_ledger: Open, fill: Fill, make_group: Make) -> None:
    """A group of version 3 that is trained at version 9 has staleness 6, wherever it spent the time in between."""
    ledger = open_ledger(1, max_staleness=6)
    fill(ledger, 7)
    for version in range(3):
        assert ledger.create(version)
        ledger.advance(version + 1)
    fill(ledger)  # ordinals 7 to 9, sampled by version 3
    for version in range(3, 10):
        assert ledger.create(version) == [version]
        ledger.advance(version + 1)
    worst = ledger.stats().steps
    assert worst[9].staleness_max == 6
    assert worst[9].staleness_mean == 6.0
    assert max(step.staleness_max for step in worst) == 6


def test_a_group_older_than_the_bound_is_never_trained(open_ledger: Open, fill: Fill) -> None:
    """Credit and order keep the bound; were the file altered, the manifest would still refuse."""
    ledger = open_ledger(1, max_staleness=2)
    fill(ledger)
    for version in range(2):
        ledger.create(version)
        ledger.advance(version + 1)
        fill(ledger)
    ledger._store.db.execute("UPDATE grp SET version_min = -1 WHERE ordinal = 2")
    with pytest.raises(ExperienceError, match=r"ordinal 2 has tokens of version -1; at version 2.*max_staleness = 2"):
        ledger.create(2)
    assert ledger.manifest(2) == []


def test_staleness_zero_is_the_synchronous_order(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(3, num_rows=7, shuffle=True)
    for version in range(6):
        assert fill(ledger) == list(range(3 * version, 3 * version + 3))
        assert ledger.create(version) == list(range(3 * version, 3 * version + 3))
        assert {group.version_min for group in ledger.groups(version)} == {version}
        ledger.advance(version + 1)
    assert {step.staleness_max for step in ledger.stats().steps} == {0}


def test_the_last_manifest_is_short_and_then_the_buffer_is_closed(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(3, num_rows=4, epochs=2)
    sizes = []
    for version in range(3):
        fill(ledger)
        sizes.append(len(ledger.create(version)))
        ledger.advance(version + 1)
    assert sizes == [3, 3, 2]
    assert [step.short for step in ledger.stats().steps] == [None, None, "stream_ended"]
    assert fill(ledger) == []
    with pytest.raises(BufferClosed, match=r"ended after 8 prompts and 3 steps \(data\.epochs is 2\)"):
        ledger.create(3)
    assert sorted(group.row for version in range(3) for group in ledger.groups(version)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_too_many_drops_close_a_step_short(open_ledger: Open, fill: Fill, make_group: Make) -> None:
    ledger = open_ledger(4, max_dropped=5)
    keep = {1, 4}
    while fill(ledger, drop=lambda ordinal: None if ordinal in keep else "solved_all"):
        pass
    assert ledger.waiting() == 0
    assert ledger.create(0) == [1, 4]
    assert ledger.events()[-1].detail == {"step": 0, "groups": 2, "reason": "max_dropped"}
    assert ledger.stats().steps[0].short == "max_dropped"
    # A short manifest uses up its version all the same: nothing may be sampled for step 1 with the weights of step 0.
    assert fill(ledger) == []
    ledger.advance(1)
    assert len(fill(ledger)) == 4
    assert ledger.create(1) == [7, 8, 9, 10]


def test_what_is_under_way_at_the_drop_limit_is_waited_for(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(3, max_dropped=2)
    first, second, third = ledger.lease(9, "w", 60.0)
    ledger.drop(first, "solved_all")
    ledger.drop(second, "solved_all")
    assert ledger.lease(9, "w", 60.0) == []
    assert ledger.create(0) == []  # the third may still come
    ledger.put(third, make_group(2, 2))
    assert ledger.create(0) == [2]


def test_prompts_given_back_at_the_drop_limit_stay_for_later(open_ledger: Open, fill: Fill, make_group: Make) -> None:
    ledger = open_ledger(3, max_dropped=2)
    first, second, third = ledger.lease(9, "w", 60.0)
    ledger.drop(second, "solved_all")
    ledger.put(third, make_group(2, 2))
    (fourth,) = ledger.lease(9, "w", 60.0)
    ledger.drop(fourth, "solved_all")
    ledger.release(first)
    assert ledger.create(0) == [2]
    assert ledger.lease(9, "w", 60.0) == []  # ordinal 0 waits for version 1, or it would be trained stale
    ledger.advance(1)
    assert fill(ledger) == [0, 4, 5]
    assert ledger.create(1) == [0, 4, 5]
    assert ledger.stats().steps[1].staleness_max == 0


def test_every_group_dropped_is_an_error_with_the_rewards(open_ledger: Open, make_group: Make) -> None:
    """Reward constant 1: after the limit an error with the table; no version, no manifest, and never a hang."""
    ledger = open_ledger(2)
    while leases := ledger.lease(9, "w", 60.0):
        for lease in leases:
            rewards = (1.0, 1.0) if lease.ordinal % 4 else (0.0, 0.0)
            if lease.ordinal == 7:
                ledger.drop(lease, "error: no grader")
            else:
                ledger.drop(
                    lease,
                    "solved_all" if lease.ordinal % 4 else "solved_none",
                    make_group(lease.ordinal, lease.ordinal, 0, rewards),
                )
    with pytest.raises(NothingToTrain) as caught:
        ledger.create(0)
    lines = str(caught.value).splitlines()
    assert lines[0] == "step 0: all 20 groups were dropped and none is left to train on (rollout.max_dropped = 20):"
    assert [line.split() for line in lines[1:5]] == [
        ["reason", "groups", "reward", "mean", "lowest", "highest"],
        ["solved_none", "5", "0", "0", "0"],
        ["solved_all", "14", "1", "1", "1"],
        ["error", "1", "no", "rewards"],
    ]
    assert "rollout.group_size" in lines[5]
    assert (ledger.stats().weight_version, ledger.stats().next_step, len(ledger.finished(0))) == (0, 0, 20)
    with pytest.raises(NothingToTrain):
        ledger.create(0)


def test_many_reasons_do_not_flood_the_table(open_ledger: Open) -> None:
    ledger = open_ledger(1, max_dropped=20)
    for index in range(20):
        (lease,) = ledger.lease(1, "w", 60.0)
        ledger.drop(lease, f"reason{index}")
    with pytest.raises(NothingToTrain, match="and 8 more reasons"):
        ledger.create(0)


def test_only_given_back_prompts_left_at_the_limit(open_ledger: Open) -> None:
    ledger = open_ledger(2, max_dropped=1)
    first, second = ledger.lease(9, "w", 60.0)
    ledger.drop(first, "error")
    ledger.release(second)
    with pytest.raises(NothingToTrain, match="all 1 groups were dropped"):
        ledger.create(0)


def test_a_finite_stream_of_dropped_groups(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2, num_rows=3, epochs=1)
    while fill(ledger, drop=lambda ordinal: "solved_none"):
        pass
    with pytest.raises(NothingToTrain, match="solved_none"):
        ledger.create(0)


def test_a_repeated_prompt_is_dropped_from_the_step(open_ledger: Open, fill: Fill, make_group: Make) -> None:
    """Drops pull the next epoch's first rows into a step that already holds them: the later group goes."""
    ledger = open_ledger(3, num_rows=3)
    (held, other) = (fill(ledger, drop=lambda ordinal: "solved_all" if ordinal == 1 else None), None)
    assert (held, other) == ([0, 1, 2], None)
    assert fill(ledger) == [3]  # row 0 again, as ordinal 0
    assert ledger.create(0) == []
    assert fill(ledger) == [4]  # row 1
    assert ledger.create(0) == [0, 2, 4]
    assert [(summary.ordinal, summary.reason) for summary in ledger.finished(0)] == [
        (0, None),
        (1, "solved_all"),
        (2, None),
        (3, "repeated_prompt"),
        (4, None),
    ]
    assert ledger.finished(0)[3].rewards == (0.0, 1.0)
    row = ledger._store.one("SELECT detail FROM dropped WHERE run = ? AND ordinal = 3")
    assert row is not None
    assert row["detail"] == "the row of ordinal 0"


def test_a_retransmitted_repeated_prompt_is_a_duplicate(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2, num_rows=2)
    leases = ledger.lease(9, "w", 60.0)
    ledger.put(leases[0], make_group(0, 0))
    ledger.drop(leases[1], "solved_all")
    (third,) = ledger.lease(9, "w", 60.0)
    ledger.put(third, make_group(2, 0))
    assert ledger.create(0) == []
    assert ledger.put(third, make_group(2, 0)) is False
    assert ledger.stats().drops_by_reason == {"repeated_prompt": 1, "solved_all": 1}


def test_summaries_are_equal_after_a_resume(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(2)
    for version in range(3):
        while fill(ledger, drop=lambda ordinal: "solved_all" if ordinal % 3 == 1 else None):
            pass
        ledger.create(version)
        ledger.advance(version + 1)
    before = [ledger.finished(version) for version in range(3)]
    ledger.close()
    again = open_ledger(2, resume=True)
    again.rewind(0)
    assert [again.finished(version) for version in range(3)] == before
    for summaries in before:
        assert [summary.ordinal for summary in summaries] == sorted(summary.ordinal for summary in summaries)
        assert sum(summary.reason is None for summary in summaries) == 2


def test_a_full_next_step_in_the_buffer_does_not_block_a_resume(open_ledger: Open, fill: Fill) -> None:
    """Stopped with a whole batch for step k + 1 in the buffer: steps k + 1, k + 2 and k + 3 complete."""
    ledger = open_ledger(2, max_staleness=1)
    fill(ledger)
    ledger.create(0)
    ledger.advance(1)
    ledger.close()
    again = open_ledger(2, max_staleness=1, resume=True)
    again.rewind(1)
    for version in (1, 2, 3):
        fill(again)
        assert again.create(version) == [2 * version, 2 * version + 1]
        again.advance(version + 1)
