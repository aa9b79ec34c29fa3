"""An engine with weights of its own, which follow those that a learner publishes. Imports no torch."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from miles.errors import EngineError
from miles.protocols import Engine
from miles.types import Completion, Sampling

log = logging.getLogger(__name__)

LOOK_S = 0.05


class Weights(Protocol):
    """Published weights, and the copy of them that an engine samples with."""

    def newest(self) -> int | None:
        """The newest version that is published; None before the first."""
        ...

    def load(self, version: int) -> bool:
        """Make the copy this version; False where it has been deleted in the meantime, for a newer one is there."""
        ...


class FollowingEngine:
    """Samples with the newest published weights; satisfies `miles.protocols.Engine`.

    Weights stand still while calls are under way: the first call that finds a newer version waits until those have ended,
    later calls wait behind it, and then all of them sample with the new version. So every token of a call has one version.
    """

    def __init__(self, engine: Engine, weights: Weights, timeout_s: float) -> None:
        """`timeout_s`: longest wait for a version that is asked for."""
        self._engine, self._weights, self._timeout = engine, weights, timeout_s
        self.version = -1
        self._under_way = 0
        self._idle = asyncio.Event()
        self._turn = asyncio.Lock()

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        """As the engine's own. Raises EngineError where `min_version` is not published in time."""
        async with self._turn:
            await self._follow(min_version)
            self._under_way += 1
            self._idle.clear()
        try:
            return await self._engine.generate(ids, n, sampling, seeds, min_version)
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._idle.set()

    async def _follow(self, min_version: int) -> None:
        """Until the copy holds the newest version, which is at least `min_version`."""
        deadline = time.monotonic() + self._timeout
        while True:
            newest = self._weights.newest()
            if newest is not None and newest >= min_version:
                if newest == self.version:
                    return
                if self._under_way:
                    await self._idle.wait()
                elif self._weights.load(newest):
                    log.info("samples with version %d", newest)
                    self.version = newest
                continue
            if time.monotonic() > deadline:
                there = "none is published" if newest is None else f"the newest published ones are {newest}"
                raise EngineError(
                    f"tokens of version {min_version} or newer are asked for, but {there} after {self._timeout:g} s: see whether "
                    "the learner runs, and whether publish.directory is the same folder for both"
                )
            await asyncio.sleep(LOOK_S)
