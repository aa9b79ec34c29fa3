"""Calls functions of the user's so that a slow one never blocks the event loop and a stuck one gives its place back."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from miles.errors import in_words

T = TypeVar("T")


class TimedOut(Exception):
    """The call took longer than the caller's time limit."""


class Caller:
    """Runs plain functions in threads and coroutine functions on the loop: at most `workers` at a time.

    The time limit starts when the call gets its place. A thread cannot be stopped from outside: a function that never
    returns keeps its (daemon) thread, but its place is free again and the process can still end.
    """

    def __init__(self, workers: int = 8, timeout_s: float | None = None) -> None:
        self.workers = workers
        self.timeout_s = timeout_s
        # One process may run several loops after each other, and a semaphore belongs to the loop it waited on.
        self._places: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The function's result. Raises what it raised, or TimedOut."""
        bound = functools.partial(function, *args, **kwargs)
        async with self._place():
            try:
                async with asyncio.timeout(self.timeout_s) as limit:
                    result = bound() if is_async(function) else await _in_thread(bound)
                    return await contained(result) if inspect.isawaitable(result) else result
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise TimedOut from error

    def _place(self) -> asyncio.Semaphore:
        loop = asyncio.get_running_loop()
        if loop not in self._places:
            self._places[loop] = asyncio.Semaphore(self.workers)
        return self._places[loop]


def is_async(function: Callable[..., Any]) -> bool:
    """True for coroutine functions, also behind `functools.partial` or a `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


async def all_or_none(calls: list[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; when one call fails the others are cancelled and the first failure, by place, is raised."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise outcome
    return [task.result() for task in tasks]


async def contained(work: Awaitable[Any]) -> Any:
    """The result of a coroutine of the user's. It may end or cancel itself: that is its failure, a RuntimeError here."""
    task = asyncio.ensure_future(_without_exit(work))
    try:
        return await task
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is not None and current.cancelling():  # asked for from outside, which ended `task` too
            raise
        raise RuntimeError("CancelledError, and nobody else had cancelled it") from error


async def _without_exit(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(in_words(error)) from error


def _in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    context = contextvars.copy_context()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more: timed out or cancelled
            return
        if error is None:
            future.set_result(result)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            future.set_exception(error)
        else:
            # sys.exit() in a reward must not end the training process, and a future refuses StopIteration.
            wrapped = RuntimeError(in_words(error))
            wrapped.__cause__ = error
            future.set_exception(wrapped)

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(function)
        except BaseException as raised:
            error = raised
        if not loop.is_closed():
            try:
                loop.call_soon_threadsafe(settle, result, error)
            except RuntimeError:  # the loop was closed in between, so nobody waits
                return

    threading.Thread(target=work, daemon=True, name="miles-user-code").start()
    return future
