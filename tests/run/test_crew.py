"""Rank 0 leads: its actions, results, errors and signals reach every rank, whatever the duties do."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from miles.errors import BadInput, BufferClosed, ConfigError, EngineError
from miles.learn.channel import Channel
from miles.rollout.evaluate import Evaluation
from miles.run.crew import Crew, heard, said
from miles.run.duties import Share, collect_share, evaluate_share
from miles.run.interrupts import Interrupted
from miles.run.join import check_alike, packages
from miles.types import Group, Lease, Sample, Segment


def job_lead() -> list[object]:
    crew, done = Crew(Channel.open()), []
    crew.take_up({"add": lambda number: done.append(number)})

    def action() -> str:
        crew.call("add", number=1)
        crew.call("add", number=2)
        return "led"

    found = [crew.together(action), crew.agree(lambda: {"stop": crew.leads})]
    return [found, done]


def failing(error: BaseException) -> str:
    def action() -> None:
        raise error

    crew = Crew(Channel.open())
    try:
        crew.together(action)
    except BaseException as met:
        return f"{type(met).__name__}: {met.signum if isinstance(met, Interrupted) else met}"
    return "nothing"


def job_fail() -> list[str]:
    return [failing(error) for error in (BufferClosed("over"), ConfigError(["a", "b"]), Interrupted(15))]


def job_duty_fails() -> str:
    """A duty that fails on every rank is one error everywhere, not a rank that is missing."""
    crew = Crew(Channel.open())

    def duty() -> None:
        raise EngineError("no room")

    crew.take_up({"fail": duty})
    try:
        crew.together(lambda: crew.call("fail"))
    except EngineError as error:
        return str(error)
    return "nothing"


def job_alike() -> str:
    crew = Crew(Channel.open())
    check_alike(crew, packages())
    try:
        check_alike(crew, {**packages(), "torch": "2.1" + str(dist.get_rank())})
    except BadInput as error:
        return str(error)
    return "alike"


def lease(ordinal: int) -> Lease:
    return Lease(ordinal, f"lease-{ordinal}", 0.0, 0)


def group(ordinal: int) -> Group:
    segment = Segment((1, 2), (False, True), (0.0, -1.5), (-1, 0))
    return Group(ordinal, ordinal, (Sample((segment,), "stop", "x", 1.0),))


def job_collect() -> list[object]:
    """Five leases: each rank puts its own but the last of all, which it drops, and rank 1 meets an error at the end."""
    channel = Channel.open()

    def collect(share: Share) -> None:
        import asyncio

        async def work() -> None:
            for each in await share.lease(10, "w", 1.0):
                if each.ordinal == 4:
                    await share.drop(each, "equal_rewards")
                elif each.ordinal == 3:
                    await share.release(each)
                else:
                    await share.put(each, group(each.ordinal))

        asyncio.run(work())
        if channel.rank:
            raise EngineError("broken")

    leases = [{"ordinal": i, "lease_id": f"lease-{i}", "expires": 0.0, "min_version": 0} for i in range(5)]
    finished, error = collect_share(leases, channel, collect)
    same = all(each.group == group(each.lease.ordinal) for each in finished if each.group is not None)
    return [[(each.lease.ordinal, each.how) for each in finished], str(error), same]


def job_evaluate() -> list[int]:
    def evaluate(chosen) -> Evaluation:
        return Evaluation(tuple(map(group, chosen)), tuple(map(group, chosen)))

    found = evaluate_share(5, Channel.open(), evaluate)
    return [] if found is None else [each.ordinal for each in (*found.sampled, *found.greedy)]


@pytest.mark.slow
def test_ranks_follow_what_rank_0_does(gang):
    assert gang.run(3, job_lead) == [[["led", {"stop": True}], [1, 2]], *[[[None, {"stop": True}], [1, 2]]] * 2]


@pytest.mark.slow
def test_errors_and_signals_of_rank_0_are_raised_everywhere(gang):
    assert gang.run(2, job_fail) == [["BufferClosed: over", "ConfigError: a\nb", "Interrupted: 15"]] * 2
    assert gang.run(2, job_duty_fails) == ["no room"] * 2


@pytest.mark.slow
def test_ranks_with_other_packages_are_refused_by_name(gang):
    message = (
        "the ranks do not run the same: torch is 2.10 on rank 0 and 2.11 on rank 1. Install the same packages and put the "
        "same files on every machine, then start again."
    )
    assert gang.run(2, job_alike) == [message] * 2


@pytest.mark.slow
def test_leases_and_rows_are_shared_out_and_come_back_in_order(gang):
    ended = [[0, "put"], [1, "put"], [2, "put"], [3, "release"], [4, "drop"]]
    assert gang.run(2, job_collect) == [[ended, "broken", True], [[], "None", True]]
    assert gang.run(2, job_evaluate) == [[0, 1, 2, 3, 4] * 2, []]


def test_alone_an_action_is_just_called():
    crew = Crew(Channel())
    crew.take_up({"double": lambda number: 2 * number})
    assert crew.together(lambda: crew.call("double", number=4)) == 8
    assert crew.agree(lambda: True) is True


def test_an_error_told_is_the_error_heard():
    for error in (BufferClosed("x"), ConfigError(["a", "b"]), EngineError("y")):
        again = heard(said(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert heard(said(Interrupted(2))).exit_code == 130
