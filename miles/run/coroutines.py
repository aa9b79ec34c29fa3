"""Runs the coroutines of a local run to their ends, one after the other, on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

from miles.run.interrupts import Interrupts

T = TypeVar("T")


class Coroutines:
    """An event loop that a signal interrupts in order: what runs on it is cancelled, and gives back what it holds.

    The loop runs in the calling thread, which waits; where that thread is inside a loop already (a notebook), in a thread
    of its own. Use it as a context manager.
    """

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._runner = asyncio.Runner()
        self._thread = ThreadPoolExecutor(1, "miles-loop") if _inside_a_loop() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._call(self._runner.close)
        if self._thread is not None:
            self._thread.shutdown()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result. Raises what it raises, and Interrupted after a signal."""
        running: list[asyncio.Task[Any]] = []
        stopped = False

        async def main() -> T:
            if (task := asyncio.current_task()) is not None:
                running.append(task)
                if stopped:
                    task.cancel()
            return await coroutine

        def cancel() -> None:
            nonlocal stopped
            stopped = True
            for task in running:
                task.get_loop().call_soon_threadsafe(task.cancel)

        with self._interrupts.cancelling(cancel):
            return self._call(self._runner.run, main())

    def _call(self, function: Any, *args: Any) -> Any:
        return function(*args) if self._thread is None else self._thread.submit(function, *args).result()


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
