"""Groups that cannot be trained on are noted and counted; too many of them, or a full disk, stop collecting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest

from miles.buffer.ledger import Ledger
from miles.errors import DiskFull, GroupRefused, PoisonedData
from miles.types import Group

from .stores import EVERY_STORE

pytestmark = EVERY_STORE
Open = Callable[..., Ledger]
Make = Callable[..., Group]


def spoilt(group: Group) -> Group:
    """The same with a log-probability that is not a number."""
    sample = group.samples[0]
    segment = dataclasses.replace(sample.segments[0], behavior_logprobs=(0.0, math.nan, -1.0, -1.0))
    return dataclasses.replace(group, samples=(dataclasses.replace(sample, segments=(segment,)), *group.samples[1:]))


def test_a_refused_group_is_noted_once_and_the_lease_stays(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)
    lease, _ = ledger.lease(2, "w", 60.0)
    for _ in range(3):
        with pytest.raises(GroupRefused, match=r"behavior_logprobs\[1\] is nan") as refused:
            ledger.put(lease, spoilt(make_group(0, 0)))
        assert refused.value.reason == "non_finite"
    rows = ledger._store.all("SELECT ordinal, worker, reason FROM quarantine WHERE run = ?")
    assert list(map(tuple, rows)) == [(0, "w", "non_finite")]
    assert ledger.stats().refused == 1
    assert ledger.put(lease, make_group(0, 0)) is True


def test_who_holds_no_lease_cannot_poison_a_run(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)
    lease, _ = ledger.lease(2, "w", 60.0)
    with pytest.raises(GroupRefused):
        ledger.put(dataclasses.replace(lease, lease_id="guessed"), spoilt(make_group(0, 0)))
    assert ledger.stats().refused == 0


def test_above_its_part_of_refused_groups_the_run_is_aborted_with_a_table(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(40, max_refused=0.5)
    leases = ledger.lease(40, "w", 60.0)
    for lease in leases[:20]:
        with pytest.raises(GroupRefused):
            ledger.put(lease, spoilt(make_group(lease.ordinal, lease.ordinal)))
        ledger.release(lease)
    assert ledger.lease(1, "w", 60.0) == []  # 20 of 20
    with pytest.raises(
        PoisonedData, match=r"20 groups were refused and 0 accepted(.|\n)*non_finite +20 +ordinal"
    ) as error:
        ledger.create(0)
    assert error.value.exit_code == 3
    ledger.rewind(0)  # somebody repaired the collector and goes on
    assert len(ledger.lease(20, "w", 60.0)) == 20


def test_few_refused_groups_of_many_do_not_stop_a_run(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(40, max_refused=0.5)
    leases = ledger.lease(40, "w", 60.0)
    for lease in leases[20:]:
        ledger.put(lease, make_group(lease.ordinal, lease.ordinal))
    for lease in leases[:20]:
        with pytest.raises(GroupRefused):
            ledger.put(lease, spoilt(make_group(lease.ordinal, lease.ordinal)))
        ledger.release(lease)
    assert len(ledger.lease(40, "w", 60.0)) == 20  # 20 of 40 is a half, and not above it


def test_below_the_floor_of_the_disk_collecting_pauses_and_goes_on_by_itself(
    open_ledger: Open, make_group: Make
) -> None:
    ledger = open_ledger(2, min_free_bytes=1000)
    lease, _ = ledger.lease(2, "w", 60.0)
    payloads: Any = ledger._store.payloads
    payloads.free_bytes = lambda: 999
    for call in (lambda: ledger.lease(1, "w", 60.0), lambda: ledger.put(lease, make_group(0, 0))):
        with pytest.raises(DiskFull, match=r"less than buffer\.min_free_mb"):
            call()
    assert (ledger.stats().leased, ledger.stats().ready) == (2, 0)
    payloads.free_bytes = lambda: 1000
    assert ledger.put(lease, make_group(0, 0)) is True
