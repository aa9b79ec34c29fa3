"""Any order of calls, expiries, restarts and replays keeps the ledger's invariants."""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from miles.buffer.backend import Where
from miles.buffer.ledger import Ledger, restore
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.errors import BufferClosed, GroupRefused, LeaseLost, NothingToTrain
from miles.types import Group, Lease

from .programs import Postgres

MEMORY = Path("/dev/shm")


class LedgerMachine(RuleBasedStateMachine):
    def __init__(
        self, make_group: Callable[..., Group], clock: Callable[[], float], new_store: Callable[[], Where] = Where
    ) -> None:
        super().__init__()
        self.new_store = new_store
        self.where = new_store()
        self.make_group = make_group
        self.clock = clock
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.held: list[Lease] = []
        self.lost: list[Lease] = []
        self.acknowledged: dict[int, Group] = {}
        self.manifests: dict[int, list[int]] = {}
        self.version = 0
        self.over = False

    @initialize(
        groups=st.integers(1, 3),
        staleness=st.integers(0, 2),
        extra_rows=st.integers(0, 4),
        epochs=st.none() | st.integers(1, 3),
        max_dropped=st.integers(1, 6),
        seed=st.integers(0, 3),
    )
    def start(
        self, groups: int, staleness: int, extra_rows: int, epochs: int | None, max_dropped: int, seed: int
    ) -> None:
        self.settings = LedgerSettings(groups, staleness, max_attempts=2, max_dropped=max_dropped, inline_bytes=400)
        self.stream = PromptStream(groups + extra_rows, seed, True, groups, epochs)
        self.open(resume=False)

    def open(self, resume: bool) -> None:
        self.ledger = Ledger(
            self.folder, self.settings, self.stream, {}, resume=resume, clock=self.clock, where=self.where
        )

    def group(self, lease: Lease, version: int) -> Group:
        return self.make_group(lease.ordinal, self.stream.at(lease.ordinal).row, version, length=1 + lease.ordinal % 3)

    @rule(n=st.integers(0, 5), ttl=st.sampled_from([10.0, 1e6]))
    def lease(self, n: int, ttl: float) -> None:
        leases = self.ledger.lease(n, "w", ttl)
        assert len(leases) <= n
        assert len(leases) == n or self.ledger.waiting() == 0
        fresh = {lease.ordinal for lease in leases}
        self.lost += [lease for lease in self.held if lease.ordinal in fresh]
        self.held = [lease for lease in self.held if lease.ordinal not in fresh] + leases

    @rule(outcomes=st.lists(st.sampled_from(["put", "put", "drop", "release", "hold"]), min_size=1, max_size=9))
    def collect(self, outcomes: list[str]) -> None:
        """A collector's round: lease, and finish most of it."""
        self.lease(len(outcomes), 1e6)
        for lease, outcome in zip(self.held[-len(outcomes) :], outcomes, strict=False):
            if outcome == "put":
                self.finish(lease, lease.min_version)
            elif outcome == "drop":
                self.give_up(lease, with_group=True)
            elif outcome == "release":
                self.give_back(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), late=st.booleans())
    def put(self, data: st.DataObject, late: bool) -> None:
        lease = data.draw(st.sampled_from(self.held))
        self.finish(lease, lease.min_version if late else self.ledger.stats().weight_version)

    def finish(self, lease: Lease, version: int) -> None:
        group = self.group(lease, version)
        try:
            new = self.ledger.put(lease, group)
        except LeaseLost:
            self.forget(lease)
            return
        assert new
        assert not self.ledger.put(lease, group)
        self.acknowledged[lease.ordinal] = group
        self.held.remove(lease)
        self.lost.append(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), with_group=st.booleans())
    def drop(self, data: st.DataObject, with_group: bool) -> None:
        self.give_up(data.draw(st.sampled_from(self.held)), with_group)

    def give_up(self, lease: Lease, with_group: bool) -> None:
        try:
            self.ledger.drop(lease, "filtered", self.group(lease, lease.min_version) if with_group else None)
        except LeaseLost:
            self.forget(lease)
            return
        self.held.remove(lease)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.sampled_from(self.held)))

    def give_back(self, lease: Lease) -> None:
        try:
            self.ledger.release(lease)
        except LeaseLost:
            self.forget(lease)
            return
        self.held.remove(lease)
        self.lost.append(lease)

    def forget(self, lease: Lease) -> None:
        assert self.clock() > lease.expires
        self.held.remove(lease)
        self.lost.append(lease)

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def zombie(self, data: st.DataObject) -> None:
        """Work under a lease that is not held any more never changes what is stored."""
        lease = data.draw(st.sampled_from(self.lost))
        before = self.ledger.stats()
        try:
            assert not self.ledger.put(
                lease, self.acknowledged.get(lease.ordinal) or self.group(lease, lease.min_version)
            )
        except LeaseLost:
            assert lease.ordinal not in self.acknowledged or before.dropped
        assert self.ledger.stats() == before

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds  # type: ignore[attr-defined]

    @precondition(lambda self: not self.over)
    @rule(advance=st.booleans())
    def take(self, advance: bool) -> None:
        try:
            ordinals = self.ledger.create(self.version)
        except BufferClosed:
            assert self.ledger.stats().issued == self.stream.length
            self.over = True
            return
        except NothingToTrain:
            assert self.ledger.stats().ready == 0
            self.over = True
            return
        if not ordinals:
            return
        assert self.manifests.setdefault(self.version, ordinals) == ordinals
        assert [group.ordinal for group in self.ledger.groups(self.version)] == ordinals
        if self.ledger.stats().steps[self.version].short is None:
            assert all(lease.ordinal > ordinals[-1] for lease in self.held)  # nothing under way was overtaken
        if advance:
            self.version += 1
            self.ledger.advance(self.version)

    @rule(kill=st.booleans())
    def restart(self, kill: bool) -> None:
        if kill:
            self.ledger.release_all()
            self.lost += self.held
            self.held = []
        self.ledger.close()
        self.open(resume=True)

    @rule(back=st.integers(1, 5))
    def replay(self, back: int) -> None:
        target = max(self.version - back, self.ledger.stats().replayable_from)
        self.ledger.rewind(target)
        for version in range(target, self.version):
            assert self.ledger.create(version) == self.manifests[version]
            self.ledger.advance(version + 1)

    @precondition(lambda self: self.version > 0)
    @rule(back=st.integers(1, 2))
    def resample(self, back: int) -> None:
        """The weights after a version are gone: what they led to is void, and the same prompts are sampled again."""
        target = max(self.version - back, self.ledger.stats().committed)
        if target == self.version:
            return
        self.ledger.rewind(target, "resample")
        kept = {ordinal for step in range(target) for ordinal in self.manifests[step]}
        self.manifests = {step: self.manifests[step] for step in range(target)}
        self.acknowledged = {ordinal: group for ordinal, group in self.acknowledged.items() if ordinal in kept}
        self.lost += self.held
        self.held = []
        self.version, self.over = target, False
        assert self.ledger.stats().trained == len(kept)

    @precondition(lambda self: self.version > 0)
    @rule(back=st.integers(0, 2))
    def commit(self, back: int) -> None:
        self.ledger.commit(max(self.version - back, 0), "checkpoint")

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """A group of another row is refused, and nothing but the count of refusals changes."""
        lease = data.draw(st.sampled_from(self.held))
        before = self.ledger.stats()
        group = dataclasses.replace(self.group(lease, lease.min_version), row=10**6)
        with pytest.raises((GroupRefused, LeaseLost)):
            self.ledger.put(lease, group)
        after = dataclasses.replace(self.ledger.stats(), refused=before.refused)
        assert after == before

    @rule()
    def lose_the_disk(self) -> None:
        """The ledger is made again from a snapshot of this moment, and the learner goes on from where it stands."""
        saved = b"".join(self.ledger.snapshot())
        self.ledger.close()
        shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.where = self.new_store()
        restore(self.folder, saved, where=self.where)
        self.open(resume=True)
        self.ledger.rewind(self.version, "resample")
        self.manifests = {step: self.manifests[step] for step in range(self.version)}
        self.acknowledged.clear()
        self.lost += self.held
        self.held, self.over = [], False
        assert self.ledger.stats().trained == sum(map(len, self.manifests.values()))

    @invariant()
    def nothing_is_lost_and_nothing_is_twice(self) -> None:
        if not hasattr(self, "ledger"):
            return
        stats = self.ledger.stats()
        assert stats.issued == stats.trained + stats.dropped + stats.pending + stats.leased + stats.ready
        assert stats.leased + stats.ready <= stats.capacity
        placed = [ordinal for step in range(stats.next_step) for ordinal in self.ledger.manifest(step)]
        assert len(placed) == len(set(placed))
        for step, ordinals in self.manifests.items():
            assert self.ledger.manifest(step) == ordinals
            rows = [self.stream.at(ordinal).row for ordinal in ordinals]
            assert len(rows) == len(set(rows)) <= self.settings.groups_per_step
        assert all(step.staleness_max <= self.settings.max_staleness for step in stats.steps)

    def teardown(self) -> None:
        if hasattr(self, "ledger"):
            for ordinal, group in self.acknowledged.items():
                assert self.ledger.group(ordinal) == group
            assert self.ledger.verify() == len(self.manifests)
            self.ledger.close()
        shutil.rmtree(self.folder)


def test_invariants(make_group: Callable[..., Group], clock: Callable[[], float]) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(make_group, clock),
        settings=settings(
            max_examples=40,
            stateful_step_count=50,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_invariants_on_postgresql(
    make_group: Callable[..., Group], clock: Callable[[], float], postgres: Postgres
) -> None:
    run_state_machine_as_test(
        lambda: LedgerMachine(make_group, clock, lambda: Where(ledger=postgres.database())),
        settings=settings(
            max_examples=4, stateful_step_count=30, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
