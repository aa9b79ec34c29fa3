from __future__ import annotations

import asyncio
import contextvars
import functools
import sys
import threading
import time

import pytest

from miles.env.calling import Caller, TimedOut, all_or_none, is_async


async def test_a_slow_plain_function_does_not_block_the_loop_and_eight_run_at_a_time():
    gaps: list[float] = []

    async def heartbeat() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.02)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    beat = asyncio.ensure_future(heartbeat())
    start = time.monotonic()
    await asyncio.gather(*(Caller(8, 10).call(time.sleep, 0.3) for _ in range(8)))
    took = time.monotonic() - start
    beat.cancel()
    assert took < 8 * 0.3 / 2
    assert max(gaps) < 0.3


async def test_a_stuck_function_gives_its_place_back():
    stuck = threading.Event()
    caller = Caller(workers=1, timeout_s=0.05)
    try:
        with pytest.raises(TimedOut):
            await caller.call(stuck.wait)
        assert await caller.call(lambda: 9) == 9
    finally:
        stuck.set()


async def test_workers_bound_the_calls_under_way():
    now, most = 0, 0
    lock = threading.Lock()

    def count() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02)
        with lock:
            now -= 1

    caller = Caller(workers=3)
    await asyncio.gather(*(caller.call(count) for _ in range(9)))
    assert most == 3


async def test_coroutines_awaitables_and_the_callers_context():
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(7)

    async def seven() -> int:
        return variable.get()

    caller = Caller()
    assert await caller.call(seven) == 7
    assert await caller.call(lambda: seven()) == 7
    assert await caller.call(variable.get) == 7


@pytest.mark.parametrize("error", [ValueError("x"), TimeoutError("mine")])
async def test_the_functions_own_error_comes_through(error):
    def fail() -> None:
        raise error

    async def fail_later() -> None:
        raise error

    for function in (fail, fail_later):
        with pytest.raises(type(error), match=str(error)):
            await Caller(timeout_s=5).call(function)


@pytest.mark.parametrize("function", [sys.exit, functools.partial(next, iter(()))])
async def test_exit_and_stop_iteration_are_ordinary_failures(function):
    with pytest.raises(RuntimeError, match=r"SystemExit|StopIteration"):
        await Caller().call(function)


def test_one_caller_serves_loop_after_loop():
    caller = Caller(workers=1)

    async def twice() -> list[int]:
        return await asyncio.gather(caller.call(lambda: 1), caller.call(lambda: 2))

    assert [asyncio.run(twice()) for _ in range(2)] == [[1, 2], [1, 2]]


def test_async_functions_are_seen_behind_partials_and_calls():
    async def f(k: int = 0) -> None: ...

    class Async:
        async def __call__(self) -> None: ...

    assert is_async(f)
    assert is_async(functools.partial(functools.partial(f, k=1)))
    assert is_async(Async())
    assert not is_async(len)


async def test_all_or_none_cancels_the_rest_and_raises_the_first_failure():
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await all_or_none([slow(), fail()])
    assert ended == ["cancelled"]
    assert await all_or_none([asyncio.sleep(0.01, 1), asyncio.sleep(0, 2)]) == [1, 2]
    assert await all_or_none([]) == []


async def test_a_cancellation_from_outside_ends_a_users_coroutine_and_stays_one():
    ended = []

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    task = asyncio.ensure_future(Caller().call(waits))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_what_a_users_coroutine_does_to_itself_is_its_own_failure():
    async def leaves() -> None:
        sys.exit(3)

    async def cancels() -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        await Caller().call(leaves)
    with pytest.raises(RuntimeError, match="nobody else had cancelled it"):
        await Caller().call(cancels)
