"""Coroutines are run to their ends, in order; a signal cancels what runs and lets it clean up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from miles.run.coroutines import Coroutines
from miles.run.interrupts import Interrupted, Interrupts


async def number(value: int) -> int:
    await asyncio.sleep(0)
    return value


def test_results_and_errors_come_back_one_after_the_other():
    async def fails() -> None:
        raise ValueError("no")

    with Coroutines(Interrupts()) as loop:
        assert [loop.run(number(1)), loop.run(number(2))] == [1, 2]
        with pytest.raises(ValueError, match="no"):
            loop.run(fails())
        assert loop.run(number(3)) == 3


async def test_inside_a_loop_they_run_in_a_thread_of_their_own():
    async def where() -> int:
        return threading.get_ident()

    with Coroutines(Interrupts()) as loop:
        there = loop.run(where())
        assert there == loop.run(where())
    assert there != threading.get_ident()


@pytest.mark.parametrize("inside_a_loop", [False, True])
def test_a_signal_cancels_what_runs_and_waits_for_its_end(inside_a_loop):
    ends: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ends.append("child")

    async def parent() -> None:
        task = asyncio.ensure_future(child())
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        try:
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0.01)
            ends.append("parent")

    def run() -> None:
        interrupts = Interrupts()
        with interrupts.active(), Coroutines(interrupts) as loop, pytest.raises(Interrupted) as caught:
            loop.run(parent())
        assert caught.value.exit_code == 143

    async def outer() -> None:
        run()

    asyncio.run(outer()) if inside_a_loop else run()
    assert ends == ["child", "parent"]


def test_a_second_signal_does_not_wait():
    async def stubborn() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)

    interrupts = Interrupts()
    with interrupts.active(), Coroutines(interrupts) as loop, pytest.raises(Interrupted):
        loop.run(stubborn())


def test_a_coroutine_that_ends_in_spite_of_the_signal_still_stops_the_run():
    async def ends() -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return 1

    interrupts = Interrupts()
    with interrupts.active(), Coroutines(interrupts) as loop:
        with pytest.raises(Interrupted):
            loop.run(ends())
        assert loop.run(number(4)) == 4
