"""The embedded buffer: inline collecting, one loop for every staleness, resume equal to the unbroken run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from miles.buffer.embedded import EmbeddedBuffer
from miles.buffer.ledger import Ledger
from miles.errors import BufferClosed, ExperienceError, NothingToTrain, RewardError
from miles.protocols import ExperienceSink, ExperienceSource
from miles.types import Group, Lease

Open = Callable[..., Ledger]
Make = Callable[..., Group]


class Crash(BaseException):
    """Stands for the end of the process: nothing catches it."""


class Collector:
    """Collects until the sink gives no more leases: two at a time, finishing them in reverse order."""

    def __init__(
        self,
        ledger: Ledger,
        make_group: Make,
        drop: Callable[[int], bool] = lambda ordinal: False,
        crash_at: int | None = None,
    ) -> None:
        self.buffer = EmbeddedBuffer(ledger, collect=self.run)
        self.calls = 0
        self._stream = ledger.stream
        self._make_group = make_group
        self._drop = drop
        self._crash_at = crash_at
        self._finished = 0

    def run(self) -> None:
        self.calls += 1
        asyncio.run(self._collect(self.buffer))

    async def _collect(self, sink: ExperienceSink) -> None:
        while leases := await sink.lease(2, "inline", 60.0):
            for lease in reversed(await sink.renew(leases)):
                await self._finish(sink, lease)

    async def _finish(self, sink: ExperienceSink, lease: Lease) -> None:
        if self._finished == self._crash_at:
            raise Crash
        self._finished += 1
        # What the weights of this version say about this prompt, and nothing else.
        group = self._make_group(lease.ordinal, self._stream.at(lease.ordinal).row, lease.min_version)
        if self._drop(lease.ordinal):
            await sink.drop(lease, "solved_all", group)
        else:
            await sink.put(lease, group)


def train(source: ExperienceSource, start: int, steps: int) -> list[Any]:
    """What a learner sees of each step."""
    seen = []
    for version in range(start, steps):
        groups = source.take(version)
        seen.append((groups, source.finished(version)))
        source.advance(version + 1)
    return seen


@pytest.mark.parametrize(("staleness", "drops"), [(0, False), (0, True), (2, True)])
def test_a_crash_at_any_place_and_a_resume_equal_the_unbroken_run(
    open_ledger: Open, make_group: Make, tmp_path: Path, staleness: int, drops: bool
) -> None:
    def drop(ordinal: int) -> bool:
        return drops and ordinal % 3 == 2

    keys = {"num_rows": 7, "shuffle": True, "max_staleness": staleness}
    unbroken = train(Collector(open_ledger(3, **keys), make_group, drop).buffer, 0, 5)
    crashes = 0
    for crash_at in (0, 1, 5, 9, 14):
        folder = tmp_path / f"crash{crash_at}"
        folder.mkdir()
        ledger = open_ledger(3, folder=folder, **keys)
        collector = Collector(ledger, make_group, drop, crash_at)
        try:
            train(collector.buffer, 0, 5)
        except Crash:
            crashes += 1
        ledger.close()
        resumed = Collector(open_ledger(3, folder=folder, resume=True, **keys), make_group, drop).buffer
        checkpoint = resumed.ledger.stats().weight_version // 2
        resumed.rewind(checkpoint)
        assert train(resumed, checkpoint, 5) == unbroken[checkpoint:]
        resumed.close()
    assert crashes == 5


def test_staleness_zero_equals_synchronous_training(open_ledger: Open, make_group: Make) -> None:
    collector = Collector(open_ledger(3), make_group)
    for version, (groups, finished) in enumerate(train(collector.buffer, 0, 4)):
        assert [group.ordinal for group in groups] == [3 * version, 3 * version + 1, 3 * version + 2]
        assert {group.version_min for group in groups} == {version}
        assert [summary.ordinal for summary in finished] == [group.ordinal for group in groups]
    assert collector.calls == 4


def test_staleness_s_trains_on_groups_that_old(open_ledger: Open, make_group: Make) -> None:
    collector = Collector(open_ledger(2, max_staleness=2), make_group)
    seen = train(collector.buffer, 0, 6)
    assert [groups[0].version_min for groups, _ in seen] == [0, 0, 0, 1, 2, 3]


def test_a_stored_manifest_needs_no_collector(open_ledger: Open, make_group: Make) -> None:
    collector = Collector(open_ledger(3), make_group)
    seen = train(collector.buffer, 0, 3)
    collector.buffer.commit(2, Path("checkpoints/step_000002"))
    collector.buffer.rewind(0)
    assert train(collector.buffer, 0, 3) == seen
    assert collector.calls == 3


def test_forty_prompts_are_trained_exactly_once(open_ledger: Open, make_group: Make) -> None:
    buffer = Collector(open_ledger(8, num_rows=40, epochs=1, shuffle=True, max_staleness=1), make_group).buffer
    rows = [group.row for groups, _ in train(buffer, 0, 5) for group in groups]
    assert sorted(rows) == list(range(40))
    with pytest.raises(BufferClosed, match="ended after 40 prompts and 5 steps"):
        buffer.take(5)


def test_all_dropped_is_an_error_and_never_a_hang(open_ledger: Open, make_group: Make) -> None:
    collector = Collector(open_ledger(2, max_dropped=5), make_group, drop=lambda ordinal: True)
    for _ in range(2):
        with pytest.raises(NothingToTrain, match=r"all 6 groups were dropped.*rollout\.max_dropped = 5"):
            collector.buffer.take(0)
    assert collector.buffer.ledger.stats().weight_version == 0


def test_a_version_out_of_turn_is_refused_before_anything_is_collected(open_ledger: Open, make_group: Make) -> None:
    collector = Collector(open_ledger(2), make_group)
    with pytest.raises(ExperienceError, match=r"take\(3\): the learner has reached version 0"):
        collector.buffer.take(3)
    assert collector.calls == 0


def test_a_collector_without_progress_is_an_error_and_not_a_loop(open_ledger: Open) -> None:
    calls = []
    buffer = EmbeddedBuffer(open_ledger(2), collect=lambda: calls.append(1))
    with pytest.raises(ExperienceError, match="returned without finishing or dropping one of 2 waiting prompts"):
        buffer.take(0)
    assert calls == [1]


async def test_releasing_is_no_progress(open_ledger: Open) -> None:
    ledger = open_ledger(2)
    buffer = EmbeddedBuffer(ledger, collect=lambda: [ledger.release(lease) for lease in ledger.lease(9, "w", 60.0)])  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(ExperienceError, match="one of 2 waiting prompts"):
        buffer.take(0)
    (lease,) = await buffer.lease(1, "w", 60.0)
    await buffer.release(lease)
    assert ledger.stats().pending == 2


def test_leases_that_the_collector_leaves_behind_are_an_error(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)

    def collect() -> None:
        first, _ = ledger.lease(2, "w", 60.0)
        ledger.put(first, make_group(0, 0))

    with pytest.raises(ExperienceError, match="step 0 cannot be filled: 1 prompts are leased and nobody collects them"):
        EmbeddedBuffer(ledger, collect=collect).take(0)


def test_what_the_collector_raises_comes_through_and_its_leases_are_free(open_ledger: Open, make_group: Make) -> None:
    ledger = open_ledger(2)
    fail = True

    def collect() -> None:
        for lease in ledger.lease(2, "w", 60.0):
            if fail and lease.ordinal == 1:
                raise RewardError("reward my_reward raised for row 1")
            ledger.put(lease, make_group(lease.ordinal, lease.ordinal))

    buffer = EmbeddedBuffer(ledger, collect=collect)
    with pytest.raises(RewardError, match="raised for row 1"):
        buffer.take(0)
    assert (ledger.stats().leased, ledger.stats().pending, ledger.stats().ready) == (0, 1, 1)
    fail = False
    assert [group.ordinal for group in buffer.take(0)] == [0, 1]
