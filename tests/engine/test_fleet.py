from __future__ import annotations

import asyncio

import pytest

from miles.engine.fleet import Fleet, Server
from miles.engine.vllm_routes import Progress
from miles.errors import EngineError


def fleet_of(count: int, places: int = 8, version: int = 1, **keys: float) -> Fleet:
    fleet = Fleet([Server(f"server {i}", f"http://s{i}", places) for i in range(count)], **keys)
    for server in fleet.servers:
        fleet.serve(server, version)
    return fleet


async def test_a_prompt_goes_to_one_server_until_that_one_has_clearly_more_to_do() -> None:
    fleet = fleet_of(3)
    chosen = [(await fleet.acquire([5, 6, 7], 0))[0] for _ in range(3)]
    assert len(set(chosen)) == 1
    loads = sorted([(await fleet.acquire([5, 6, 7], 0))[0].load for _ in range(12)])
    assert max(loads) <= 7
    assert sum(server.load for server in fleet.servers) == 15
    assert max(server.load for server in fleet.servers) - min(server.load for server in fleet.servers) <= 3


async def test_a_request_waits_for_a_place_and_not_longer() -> None:
    fleet = fleet_of(1, places=4)
    limit = fleet.servers[0].limit
    for _ in range(limit):
        await fleet.acquire([1], 0)
    waiting = asyncio.ensure_future(fleet.acquire([1], 0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    fleet.release(fleet.servers[0], 1)
    assert await asyncio.wait_for(waiting, 1) == (fleet.servers[0], 1)


async def test_servers_that_are_held_or_older_get_nothing() -> None:
    fleet = fleet_of(2, version=4)
    held, other = fleet.servers
    fleet.hold(held, "it differs")
    assert {(await fleet.acquire([i], 4))[0] for i in range(4)} == {other}
    with pytest.raises(EngineError, match=r"5 or newer .* are 4"):
        await fleet.acquire([1], 5)
    fleet.hold(other, "it hangs")
    with pytest.raises(EngineError, match=r"no server is left .* server 0: it differs; server 1: it hangs"):
        await fleet.acquire([1], 0)


async def test_a_server_that_is_coming_is_waited_for_until_the_time_is_over() -> None:
    fleet = fleet_of(1, start_timeout_s=0.2)
    (server,) = fleet.servers
    fleet.expect(server, "it is being started")
    waiting = asyncio.ensure_future(fleet.acquire([1], 2))
    await asyncio.sleep(0.02)
    await asyncio.to_thread(fleet.serve, server, 2)
    assert await waiting == (server, 2)
    fleet.expect(server, "it is being started")
    with pytest.raises(EngineError, match="server 0: it is being started"):
        await fleet.acquire([1], 2)


async def test_a_failure_is_told_once_and_calls_for_help_where_help_is_possible() -> None:
    fleet, called = fleet_of(2), []
    fleet.on_failure = called.append
    one, two = fleet.servers
    fleet.fail(one, "gone", gone=True)
    fleet.fail(one, "gone", gone=True)
    fleet.fail(two, "hangs", gone=False)
    assert called == [one]
    assert (one.failures, two.failures) == (1, 1)


async def test_weights_are_confirmed_or_not() -> None:
    fleet = fleet_of(1)
    (server,) = fleet.servers
    fleet.expect(server, "it is taking version 2")
    verdict = asyncio.ensure_future(fleet.confirmed(server, 2))
    await asyncio.sleep(0.01)
    assert not verdict.done()
    fleet.serve(server, 2)
    assert await verdict
    fleet.hold(server, "it differs")
    assert not await fleet.confirmed(server, 2)


def test_the_limit_follows_what_waits_at_the_server() -> None:
    server = Server("s", "http://s", places=16)
    start = server.limit
    assert 16 < start <= 24
    server.using[1] = start
    server.adapt(Progress(0, waiting=0))
    assert server.limit > start
    for _ in range(20):
        server.adapt(Progress(0, waiting=40))
    assert server.limit == 16
