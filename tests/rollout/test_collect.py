from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace

import pytest

from miles.algo import AlgorithmRow
from miles.config.schema import Buffer, Run
from miles.errors import EngineError, EpisodeError, RewardError
from miles.rollout.seeds import sample_seeds

PLAIN = AlgorithmRow("plain", "raw", "broadcast", "reinforce", "test")
DAPO = replace(PLAIN, name="dapo", group_centred=True, drop_equal_rewards=True)
REMAX = replace(PLAIN, name="remax", greedy_baseline=True)


def test_all_leased_groups_run_at_once_and_are_put_whole(make_world):
    world = make_world(total=100, credit=4, run=Run(seed=9))
    assert world.run() == 4
    assert sorted(world.sink.groups) == [0, 1, 2, 3]
    assert world.engine.most == 4
    assert not world.sink.held
    for ordinal, group in world.sink.groups.items():
        assert group.row == ordinal % 3
        assert len(group.samples) == 4
    assert [seeds for _, seeds, _ in world.engine.asked] == [tuple(sample_seeds(9, o, 4)) for o in range(4)]


def test_the_stream_is_collected_to_its_end_over_several_leases(make_world):
    world = make_world(total=11, credit=100)
    assert world.run() == 11
    assert world.engine.most == 4  # groups_per_step, at staleness 0
    assert make_world(total=0).run() == 0


def test_staleness_lets_more_groups_run_at_once(make_world):
    world = make_world(total=11, credit=100, buffer=Buffer(max_staleness=1))
    world.run()
    assert world.engine.most == 8


def test_groups_do_not_depend_on_what_is_collected_with_them(make_world):
    together, alone = make_world(total=6, credit=6), make_world(total=6, credit=6, groups_per_step=1)
    together.run()
    alone.run()
    assert together.sink.groups == alone.sink.groups


def test_a_run_can_be_called_again_when_there_is_credit(make_world):
    world = make_world(total=8, credit=4)
    assert world.run() == 4
    assert world.run() == 0
    world.sink.credit, world.sink.version = 8, 1
    assert world.run() == 4
    assert world.engine.asked[-1][2] == 1


def test_dropped_groups_carry_reason_and_group_and_are_refilled(make_world):
    world = make_world(
        reward=lambda row, text: 1.0 if row["name"] == 0 else float(text[0]), row=DAPO, total=9, credit=4
    )
    assert world.run() == 4
    assert {o: reason for o, (reason, _) in world.sink.dropped.items()} == {0: "equal_rewards", 3: "equal_rewards"}
    assert sorted(world.sink.groups) == [1, 2, 4, 5]
    assert world.sink.dropped[0][1].rewards == [1.0] * 4


def test_unscored_groups_are_dropped(make_world):
    world = make_world(reward=lambda row, text: None, total=2)
    assert world.run() == 0
    assert [reason for reason, _ in world.sink.dropped.values()] == ["unscored", "unscored"]


def test_remax_groups_have_their_greedy_baseline(make_world):
    world = make_world(row=REMAX, total=1)
    world.run()
    assert world.sink.groups[0].baseline_reward == 4.0


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RewardError, EpisodeError])
def test_a_row_that_always_fails_is_dropped_whole_after_the_attempts(make_world, error):
    attempts = []

    def fail(row):
        if row["name"] == 1:
            attempts.append(1)
            raise error("row 1 is broken")

    world = make_world(fail=fail, total=3, buffer=Buffer(max_attempts=3))
    assert world.run() == 2
    assert len(attempts) == 3
    assert world.sink.dropped == {1: ("error: row 1 is broken", None)}
    assert all(len(group.samples) == 4 for group in world.sink.groups.values())


def test_a_passing_failure_is_tried_again_from_the_start(make_world):
    failures = [1]

    def reward(row, text):
        if row["name"] == 1 and failures:
            failures.pop()
            raise RewardError("the judge is away")
        return float(text[0])

    whole, broken = make_world(total=3), make_world(total=3, reward=reward)
    assert (whole.run(), broken.run()) == (3, 3)
    assert broken.sink.groups == whole.sink.groups  # nothing of the first try is left


def test_a_reward_that_fails_from_the_start_stops_the_run_with_its_error(make_world):
    def reward(row, text):
        raise RewardError("reward f returned 3 rewards for 4 completions")

    world = make_world(reward=reward, total=100, credit=100)
    with pytest.raises(RewardError, match="returned 3 rewards"):
        world.run()
    assert not world.sink.held
    assert not world.sink.groups
    assert len(world.engine.asked) == 4  # the first groups_per_step attempts, and no more


def test_failures_after_a_success_of_the_step_do_not_stop_the_run(make_world):
    good = {0}

    def fail(row):
        if row["name"] not in good:
            raise RewardError("broken")

    world = make_world(fail=fail, total=9, credit=9, groups_per_step=2, buffer=Buffer(max_attempts=1))
    assert world.run() == 3
    assert sorted(world.sink.dropped) == [1, 2, 4, 5, 7, 8]
    good.clear()
    world.sink.version, world.sink.total, world.sink.credit = 1, 100, 100  # in the next step all fail: another matter
    with pytest.raises(RewardError, match="broken"):
        world.run()


@pytest.mark.parametrize("error", [EngineError("the engine died"), ZeroDivisionError("a bug")])
def test_what_is_nobodys_reward_stops_the_run_and_releases_every_lease(make_world, error):
    def fail(row):
        if row["name"] == 2:
            raise error

    async def never(row, text):
        await asyncio.sleep(60)

    world = make_world(fail=fail, reward=lambda row, text: never(row, text), total=4)
    with pytest.raises(type(error), match=str(error)):
        world.run()
    assert not world.sink.held
    assert sorted(world.sink.returned) == [0, 1, 2, 3]
    assert not world.sink.dropped


def test_a_cancelled_run_releases_every_lease(make_world):
    async def never(row, text):
        await asyncio.sleep(60)

    world = make_world(reward=lambda row, text: never(row, text), total=4)

    async def stop_early() -> None:
        task = asyncio.ensure_future(world.collector.run())
        await asyncio.sleep(0.02)
        assert len(world.sink.held) == 4
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(stop_early())
    assert not world.sink.held
    assert sorted(world.sink.returned) == [0, 1, 2, 3]


# --- leases ----------------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_renews_all_leases_once_a_third_of_their_time_has_passed(make_world):
    clock = Clock()

    async def slow(row, text):
        await asyncio.sleep(0.01)
        return float(text[0])

    def fail(row):
        clock.now += 60.0  # called once the engine has answered

    world = make_world(
        fail=fail, reward=lambda row, text: slow(row, text), total=4, clock=clock, buffer=Buffer(lease_s=600)
    )
    assert world.run() == 4
    assert world.sink.renewals == [[0, 1, 2, 3]]  # 240 s after the start, and not again before 440 s
    quiet = make_world(total=4, clock=Clock())
    quiet.run()
    assert quiet.sink.renewals == []


def test_a_group_whose_lease_was_not_renewed_is_given_up(make_world, caplog):
    clock = Clock()
    stopped = []

    async def slow(row, text):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            stopped.append(row["name"])
            raise
        return float(text[0])

    def fail(row):
        clock.now += 100.0

    world = make_world(fail=fail, reward=lambda row, text: slow(row, text), total=3, clock=clock)
    world.sink.lost = {1}
    assert world.run() == 2
    assert sorted(world.sink.groups) == [0, 2]
    assert stopped == [1]
    assert "ordinal 1 now belongs to another collector" in caplog.text


@pytest.mark.parametrize("row", [PLAIN, DAPO])
def test_a_lease_lost_at_the_end_is_not_counted(make_world, caplog, row):
    world = make_world(total=2, row=row, reward=lambda r, text: 1.0 if row is DAPO else float(text[0]))
    world.sink.lost = {1}
    assert world.run() == (0 if row is DAPO else 1)
    assert sorted({**world.sink.groups, **world.sink.dropped}) == [0]
    assert "ordinal 1 now belongs to another collector" in caplog.text


def test_a_lease_lost_by_a_failed_attempt_is_not_retried_here(make_world, caplog):
    def fail(row):
        if row["name"] == 1:
            raise RewardError("broken")

    world = make_world(fail=fail, total=3)
    world.sink.lost = {1}
    assert world.run() == 2
    assert world.sink.returned == []
    assert "ordinal 1 now belongs to another collector" in caplog.text


async def test_a_sink_that_waits_for_credit_does_not_hold_up_the_groups_that_run(make_world):
    world = make_world(total=2)
    closed = asyncio.Event()
    given = world.sink.lease

    async def waits(n, worker, ttl):
        leases = await given(n, worker, ttl)
        if not leases:
            await closed.wait()  # no credit until the run ends
        return leases

    world.sink.lease = waits
    run = asyncio.ensure_future(world.collector.run())
    while len(world.sink.groups) < 2:
        await asyncio.sleep(0.001)
    assert not run.done()
    closed.set()
    assert await run == 2


def test_collecting_imports_no_torch():
    code = (
        "import sys, miles.rollout.collect, miles.rollout.evaluate, miles.env.environment, miles.env.heldout;"
        "print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
