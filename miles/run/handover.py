"""`engine.kind = "auto"`: a run that begins in process and hands its rollouts over to vLLM where that is faster."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from miles.errors import MilesError
from miles.protocols import Engine, Publisher
from miles.run.servers import Servers, wait_ready
from miles.types import Completion, PolicyUpdate, Sampling

log = logging.getLogger(__name__)


class Ways(Protocol):
    """How servers are had: opened while training goes on, then given the learner's weights."""

    def servers(self) -> AbstractContextManager[Servers]: ...

    def serving(self, servers: Servers) -> AbstractContextManager[tuple[Engine, Publisher]]: ...


class HandOver:
    """Engine and publisher of a run that may change the engine between two steps, once.

    The servers are started when a step has sampled as many tokens as the crossover; they become ready in a thread, while
    training goes on. The first publish after that gives them its weights, and from then on they are sampled from. Whatever
    keeps them from serving is said once, and the run stays in process.
    """

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        ways: Ways,
        *,
        samples: int,
        crossover: int | None,
        start_timeout_s: float,
    ) -> None:
        """`samples`: of one step. `crossover`: tokens of a step from which vLLM is faster; None: never."""
        self._engine, self._publisher, self._ways = engine, publisher, ways
        self._samples, self._crossover, self._timeout = samples, crossover, start_timeout_s
        self._lengths: list[int] = []  # of the completions since the last publish
        self._ready: Servers | None = None
        self._failure: MilesError | None = None
        self._opening: threading.Thread | None = None
        self._ending = threading.Event()
        self._stack = ExitStack()
        self.served = False  # by vLLM

    async def generate(
        self, ids: Sequence[int], n: int, sampling: Sampling, seeds: Sequence[int], min_version: int = 0
    ) -> list[Completion]:
        """As `miles.protocols.Engine`, by the engine of this moment."""
        completions = await self._engine.generate(ids, n, sampling, seeds, min_version)
        self._lengths += [len(completion.token_ids) for completion in completions]
        return completions

    def publish(self, update: PolicyUpdate) -> None:
        """As `miles.protocols.Publisher`; between two steps, so the only place where the engine may change."""
        self._publisher.publish(update)
        work, self._lengths = self._work(), []
        if self.served or self._crossover is None or work < self._crossover:
            return
        if self._opening is None:
            log.info("a step samples %d tokens, %d or more: vLLM is started beside training", work, self._crossover)
            self._opening = threading.Thread(target=self._open, name="miles-vllm-start")
            self._opening.start()
        elif self._failure is not None:
            self._stay(self._failure)
        elif self._ready is not None:
            self._hand_over(self._ready, update.version)

    def close(self) -> None:
        """End what was started."""
        self._ending.set()
        if self._opening is not None:
            self._opening.join()
        self._stack.close()

    def _work(self) -> int:
        """Tokens that a step samples, by the completions since the last publish."""
        return round(self._samples * sum(self._lengths) / len(self._lengths)) if self._lengths else 0

    def _open(self) -> None:
        try:
            servers = self._stack.enter_context(self._ways.servers())
            wait_ready(servers, self._timeout, self._ending)
        except MilesError as error:
            self._failure = error
        else:
            self._ready = servers

    def _hand_over(self, servers: Servers, version: int) -> None:
        try:
            self._engine, self._publisher = self._stack.enter_context(self._ways.serving(servers))
        except MilesError as error:
            self._stay(error)
            return
        self.served = True
        log.warning("rollouts are handed over to vLLM: versions from %d on are sampled there", version)

    def _stay(self, error: MilesError) -> None:
        self._crossover = None
        log.warning("rollouts stay in process: %s", error)
