"""Leases: credit, fencing, expiry, attempts, idempotent puts and drops."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from miles.buffer.ledger import Ledger
from miles.errors import ExperienceError, GroupRefused, LeaseLost
from miles.types import Group, Lease

from .stores import EVERY_STORE

pytestmark = EVERY_STORE
Open = Callable[..., Ledger]
Fill = Callable[..., list[int]]
Make = Callable[..., Group]


def ordinals(leases: list[Lease]) -> list[int]:
    return [lease.ordinal for lease in leases]


def test_credit_is_the_bound_times_the_step_also_at_zero(open_ledger: Open) -> None:
    assert len(open_ledger(8).lease(100, "w", 60.0)) == 8  # S = 0 is a bound, not "no limit"


def test_credit_after_a_resume_counts_from_the_version(open_ledger: Open, fill: Fill) -> None:
    """Batch 8, bound 2, resumed at version 100 with nothing running: 24 places, not (2 + 1 + 100) * 8."""
    ledger = open_ledger(8, max_staleness=2)
    ledger._store.write(lambda: ledger._store.set(weight_version=100, next_step=100))
    ledger.close()
    assert len(open_ledger(8, max_staleness=2, resume=True).lease(10_000, "w", 60.0)) == 24


def test_credit_frees_at_advance_not_at_take(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(4, max_staleness=1)
    assert fill(ledger) == list(range(8))
    assert ledger.create(0) == [0, 1, 2, 3]
    assert ledger.lease(100, "w", 60.0) == []
    ledger.advance(1)
    assert ordinals(ledger.lease(100, "w", 60.0)) == [8, 9, 10, 11]


def test_more_ready_than_needed_is_kept_for_the_next_step(open_ledger: Open, fill: Fill) -> None:
    """Need 4, 7 ready: 4 are trained now, 3 wait, none is lost, and generation pauses without a deadlock."""
    ledger = open_ledger(4, max_staleness=1)
    fill(ledger, 7)
    assert ledger.create(0) == [0, 1, 2, 3]
    assert ledger.stats().ready == 7
    ledger.advance(1)
    assert (ledger.stats().trained, ledger.stats().ready) == (4, 3)
    fill(ledger)
    assert ledger.create(1) == [4, 5, 6, 7]


def test_sixteen_places_hold_sixteen_different_groups(open_ledger: Open, fill: Fill) -> None:
    ledger = open_ledger(16)
    assert len(fill(ledger)) == 16
    assert len(set(ledger.create(0))) == 16
    assert len({group.row for group in ledger.groups(0)}) == 16


def test_dropped_groups_free_their_place_at_once(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)
    first, _ = ledger.lease(9, "w", 60.0)
    assert ledger.lease(9, "w", 60.0) == []
    ledger.drop(first, "solved_all", make_group(0, 0))
    assert ordinals(ledger.lease(9, "w", 60.0)) == [2]


def test_the_stream_ends(open_ledger: Open) -> None:
    ledger = open_ledger(3, num_rows=3, epochs=1, max_staleness=4)
    assert ordinals(ledger.lease(9, "w", 60.0)) == [0, 1, 2]
    assert ledger.lease(9, "w", 60.0) == []


def test_released_prompts_come_first_and_the_try_does_not_count(open_ledger: Open, clock: Any) -> None:
    ledger = open_ledger(3, max_attempts=2)
    for _ in range(5):
        first = ledger.lease(1, "w", 60.0)[0]
        assert first.ordinal == 0
        ledger.release(first)
        ledger.release(first)  # twice is once
    ledger.lease(1, "w", 60.0)
    clock.now += 61  # the first try that counts
    leases = ledger.lease(9, "w", 60.0)
    assert ordinals(leases) == [0, 1, 2]
    with pytest.raises(LeaseLost, match=r"ordinal 0 is leased, and the lease .* does not hold it"):
        ledger.release(first)
    assert ledger.release_all() == 3
    assert ledger.stats().pending == 3


def test_an_expired_lease_goes_to_another_and_the_old_one_is_fenced(
    open_ledger: Open, clock: Any, make_group: Make
) -> None:
    ledger = open_ledger(1)
    (old,) = ledger.lease(1, "slow", 60.0)
    clock.now += 61
    (new,) = ledger.lease(1, "fast", 60.0)
    assert (new.ordinal, new.expires) == (0, clock.now + 60)
    for call in (
        lambda: ledger.put(old, make_group(0, 0)),
        lambda: ledger.drop(old, "error"),
        lambda: ledger.release(old),
    ):
        with pytest.raises(LeaseLost, match=r"ordinal 0 is leased.*it ran out and the prompt went on without it"):
            call()
    assert ledger.renew([old, new]) == [new]
    assert ledger.put(new, make_group(0, 0)) is True
    with pytest.raises(LeaseLost, match="ordinal 0 is done"):
        ledger.put(old, make_group(0, 0, length=4))
    assert ledger.put(old, make_group(0, 0)) is False  # the same content is the same group, whoever brings it


def test_a_late_put_counts_while_nobody_else_took_the_prompt(open_ledger: Open, clock: Any, make_group: Make) -> None:
    ledger = open_ledger(1)
    (lease,) = ledger.lease(1, "w", 60.0)
    clock.now += 1000
    assert ledger.put(lease, make_group(0, 0)) is True


def test_renewing_moves_the_expiry(open_ledger: Open, clock: Any) -> None:
    ledger = open_ledger(1)
    leases = ledger.lease(1, "w", 60.0)
    for _ in range(5):
        clock.now += 50
        (renewed,) = ledger.renew(leases)
        assert renewed == dataclasses.replace(leases[0], expires=clock.now + 60)
    assert ledger.lease(1, "other", 60.0) == []
    assert ledger.renew([Lease(77, "x", 0.0, 0)]) == []


def test_a_prompt_that_never_finishes_is_dropped_as_dead_and_counted(
    open_ledger: Open, clock: Any, make_group: Make
) -> None:
    """Two prompts, one of which fails always: it is tried 3 times, then dropped whole; the other ones are trained."""
    ledger = open_ledger(2, max_attempts=3)
    tries = 0
    while not (manifest := ledger.create(0)):
        for lease in ledger.lease(9, "w", 60.0):
            if lease.ordinal == 0:
                tries += 1
            else:
                ledger.put(lease, make_group(lease.ordinal, lease.ordinal))
        clock.now += 61
    assert tries == 3
    assert manifest == [1, 2]
    assert [(summary.ordinal, summary.reason) for summary in ledger.finished(0)] == [(0, "dead"), (1, None), (2, None)]
    (dead,) = [event for event in ledger.events() if event.kind == "dead"]
    assert dead.detail == {"ordinal": 0, "detail": "3 leases ran out, the last one held by w"}


def test_the_same_group_twice_is_one_row_and_other_content_is_refused(
    open_ledger: Open, fill: Fill, make_group: Make
) -> None:
    ledger = open_ledger(1)
    (lease,) = ledger.lease(1, "w", 60.0)
    assert [ledger.put(lease, make_group(0, 0)) for _ in range(3)] == [True, False, False]
    with pytest.raises(GroupRefused, match=r"ordinal 0 is finished with the content .* a finished group never changes"):
        ledger.put(lease, make_group(0, 0, rewards=(1.0, 1.0)))
    ledger.create(0)
    ledger.advance(1)
    assert ledger.put(lease, make_group(0, 0)) is False  # also after it was trained
    assert ledger.stats().ready + ledger.stats().trained == 1
    with pytest.raises(LeaseLost, match="ordinal 0 is trained"):
        ledger.drop(lease, "error")


def test_drops_are_idempotent_and_final(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)
    first, second = ledger.lease(2, "w", 60.0)
    ledger.drop(first, "error: the grader: timed out")
    ledger.drop(first, "error: again")
    ledger.drop(second, "solved_none", make_group(1, 1, rewards=(0.0, 0.0)))
    with pytest.raises(LeaseLost, match="ordinal 0 is dropped"):
        ledger.put(first, make_group(0, 0))
    rows = ledger._store.all("SELECT ordinal, step, reason, detail FROM dropped WHERE run = ? ORDER BY ordinal")
    assert list(map(tuple, rows)) == [(0, 0, "error", "the grader: timed out"), (1, 0, "solved_none", None)]
    assert ledger.group(1) == make_group(1, 1, rewards=(0.0, 0.0))
    assert ledger.finished(0)[1].rewards == (0.0, 0.0)


def test_samples_of_dropped_groups_need_not_be_kept(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(1, keep_dropped=False)
    (lease,) = ledger.lease(1, "w", 60.0)
    ledger.drop(lease, "solved_all", make_group(0, 0))
    assert ledger.finished(0)[0].rewards == (0.0, 1.0)
    with pytest.raises(ExperienceError, match="holds no group for ordinal 0"):
        ledger.group(0)


def test_a_short_group_is_refused_and_can_be_dropped(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(1, group_size=4)
    (lease,) = ledger.lease(1, "w", 60.0)
    short = make_group(0, 0, rewards=(0.0, 1.0, 1.0))
    with pytest.raises(GroupRefused, match=r"ordinal 0: 3 samples, but rollout\.group_size is 4"):
        ledger.put(lease, short)
    ledger.drop(lease, "short", short)
    assert ledger.stats().drops_by_reason == {"short": 1}


def test_a_retried_group_has_equal_lengths(open_ledger: Open, make_group: Make) -> None:
    """Aborted at 5 tokens, tried again from scratch with 7: every array has length 1 + 7."""
    ledger = open_ledger(1)
    ledger.release(ledger.lease(1, "w", 60.0)[0])
    (lease,) = ledger.lease(1, "w", 60.0)
    ledger.put(lease, make_group(0, 0, length=7))
    segment = ledger.group(0).samples[0].segments[0]
    fields = (segment.token_ids, segment.loss_mask, segment.behavior_logprobs, segment.versions)
    assert [len(field) for field in fields] == [8] * 4


def test_groups_are_kept_apart_by_ordinal(open_ledger: Open, make_group: Make) -> None:
    """Two data sets may both have an example 0: rewards [1, 1] and [0, 0] stay two groups without spread."""
    ledger = open_ledger(2, num_rows=2)
    first, second = ledger.lease(2, "w", 60.0)
    ledger.put(second, make_group(1, 1, rewards=(0.0, 0.0)))
    ledger.put(first, make_group(0, 0, rewards=(1.0, 1.0)))
    rows = ledger._store.all("SELECT reward_mean, reward_std FROM grp WHERE run = ? ORDER BY ordinal")
    assert list(map(tuple, rows)) == [(1.0, 0.0), (0.0, 0.0)]


def test_reward_columns_leave_out_what_has_no_score(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)
    first, second = ledger.lease(2, "w", 60.0)
    ledger.put(first, make_group(0, 0, rewards=(1.0, None, 3.0)))
    ledger.put(second, make_group(1, 1, rewards=(None, None)))
    rows = ledger._store.all("SELECT n, reward_mean, reward_std FROM grp WHERE run = ? ORDER BY ordinal")
    assert list(map(tuple, rows)) == [(3, 2.0, math.sqrt(2)), (2, None, None)]


def test_what_only_the_ledger_knows_is_checked(open_ledger: Open, fill: Fill, make_group: Make) -> None:
    ledger = open_ledger(2, num_rows=5)
    fill(ledger)
    ledger.create(0)
    ledger.advance(1)
    lease, other = ledger.lease(2, "w", 60.0)
    assert lease.min_version == 1
    with pytest.raises(GroupRefused, match="stands for row 2 of the data, the group says row 4"):
        ledger.put(lease, make_group(2, 4, 1))
    with pytest.raises(GroupRefused, match="tokens of version 2, but the newest version is 1"):
        ledger.put(lease, make_group(2, 2, 2))
    with pytest.raises(GroupRefused, match="tokens of version 0, older than 1, the lease's min_version"):
        ledger.put(dataclasses.replace(lease, min_version=0), make_group(2, 2, 0))
    for call in (ledger.put, lambda lease, group: ledger.drop(lease, "error", group)):
        with pytest.raises(GroupRefused, match="the lease is for ordinal 2, the group is of ordinal 3"):
            call(lease, make_group(3, 3, 1))
    with pytest.raises(LeaseLost, match="ordinal 50 was never issued"):
        ledger.put(Lease(50, "x", 0.0, 0), make_group(50, 0))
    assert [ledger.put(lease, make_group(2, 2, 1)), ledger.put(other, make_group(3, 3, 1))] == [True, True]


def test_bad_calls_are_refused(open_ledger: Open) -> None:
    ledger = open_ledger(1)
    for n, ttl in ((-1, 60.0), (1, 0.0), (1, math.inf), (1, math.nan)):
        with pytest.raises(ExperienceError, match="n must not be negative and ttl a positive number"):
            ledger.lease(n, "w", ttl)
    with pytest.raises(ExperienceError, match=r"worker 'a/b' must match"):
        ledger.lease(1, "a/b", 60.0)
    (lease,) = ledger.lease(1, "w", 60.0)
    with pytest.raises(ExperienceError, match="the reason 'not a name' must match"):
        ledger.drop(lease, "not a name")
    with pytest.raises(ExperienceError, match="the reason '' must match"):
        ledger.drop(lease, "")
