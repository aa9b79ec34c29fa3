"""A run on vLLM servers: an engine over them, a publisher that gives them weights, and a watch that brings them back."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from miles.config.schema import Recipe
from miles.engine.fleet import Fleet, Server
from miles.engine.vllm_client import VllmEngine
from miles.engine.vllm_routes import Access, ServerRoutes
from miles.errors import MilesError
from miles.learn.adapters import peft_config
from miles.learn.learner import Learner
from miles.learn.load import context_length
from miles.publish.canary import Tolerance
from miles.publish.carriers import Carrier, FileCarrier, ShelfCarrier
from miles.publish.files import WeightFiles
from miles.publish.vllm import VllmPublisher
from miles.publish.vllm_native import NativeCarrier, check_possible
from miles.run.prepare import Inputs
from miles.run.servers import (
    Found,
    Servers,
    joined_servers,
    own_servers,
    serving_dtype,
    wait_joined,
    wait_ready,
)

log = logging.getLogger(__name__)

CANARY = 32  # tokens that servers and learner compute at each version
RESTARTS = 3  # of each server in one run
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def open_servers(recipe: Recipe, inputs: Inputs, run_dir: Path) -> Iterator[Servers]:
    """Those of `engine.url`, or own ones, which are started and become ready while something else is done."""
    if recipe.engine.url:
        with joined_servers(recipe, inputs.config, run_dir) as servers:
            yield servers
        return
    with own_servers(recipe, inputs.tokenizer, run_dir) as servers:
        yield servers


@contextmanager
def open_vllm(
    recipe: Recipe, inputs: Inputs, learner: Learner, run_dir: Path
) -> Iterator[tuple[VllmEngine, VllmPublisher]]:
    """Servers that serve the learner's version. Raises ConfigError and EngineError where they cannot."""
    learner.canary_ids = canary_ids(inputs)
    if recipe.publish.kind in ("nccl", "ipc"):
        check_possible(recipe.publish.kind)  # before servers are started
    with open_servers(recipe, inputs, run_dir) as servers:
        wait_ready(servers, recipe.engine.start_timeout_s)
        with serving(recipe, inputs, learner, servers) as both:
            yield both


@contextmanager
def serving(
    recipe: Recipe, inputs: Inputs, learner: Learner, servers: Servers
) -> Iterator[tuple[VllmEngine, VllmPublisher]]:
    """Engine and publisher over servers that are ready: they get the learner's weights before they serve."""
    engine, dtype = recipe.engine, serving_dtype(recipe)
    adapter = peft_config(learner.model, "actor") if recipe.lora.rank else None
    fleet = Fleet([Server(one.name, one.url, one.places) for one in servers.found], engine.start_timeout_s)
    access = servers.access
    publisher = VllmPublisher(
        fleet, carrier_of(recipe, servers, adapter), partial(ServerRoutes, access=access),
        max_staleness=recipe.buffer.max_staleness, verify=recipe.publish.verify, tolerance=Tolerance.of(dtype),
    )  # fmt: skip
    publisher.publish(learner.policy_update())
    found = dict(zip(fleet.servers, servers.found, strict=True))
    with Watch(fleet, found, publisher, engine.start_timeout_s, access).running():
        yield (
            VllmEngine(
                fleet, inputs.tokenizer, end_token_ids=inputs.sampling.stop_token_ids,
                context=engine.context or context_length(inputs.config),
                vocabulary=inputs.config.get_text_config().vocab_size,
                adapters=adapter is not None, stall_s=engine.stall_s, access=access,
            ),
            publisher,
        )  # fmt: skip


def carrier_of(recipe: Recipe, servers: Servers, adapter: Mapping[str, Any] | None) -> Carrier:
    """How versions get to the servers. Raises ConfigError where this machine has no such way."""
    kind, dtype = recipe.publish.kind, DTYPES[serving_dtype(recipe)]
    if kind in ("nccl", "ipc"):
        return NativeCarrier(kind, dtype)
    files = WeightFiles(servers.root, dtype, adapter)
    return FileCarrier(files) if servers.shelf is None else ShelfCarrier(files, servers.shelf)


def canary_ids(inputs: Inputs) -> list[int]:
    """A rendered prompt of the run, and then ids from all over the vocabulary: `CANARY` tokens in all."""
    prompt = list(inputs.renderer.prompt(inputs.train[0]).ids)[: CANARY // 2]
    vocabulary = inputs.config.get_text_config().vocab_size
    return prompt + [(7919 * place + 17) % vocabulary for place in range(CANARY - len(prompt))]


@dataclass(frozen=True)
class VllmWays:
    """How a run that began in process comes to its servers; satisfies `miles.run.handover.Ways`."""

    recipe: Recipe
    inputs: Inputs
    learner: Learner
    run_dir: Path

    def servers(self) -> AbstractContextManager[Servers]:
        return open_servers(self.recipe, self.inputs, self.run_dir)

    def serving(self, servers: Servers) -> AbstractContextManager[tuple[VllmEngine, VllmPublisher]]:
        """Called between two steps: the learner computes the canary of its version."""
        self.learner.canary_ids = canary_ids(self.inputs)
        return serving(self.recipe, self.inputs, self.learner, servers)


class Watch:
    """Brings servers back: starts own ones again, waits for others, and gives them the newest weights before they serve."""

    def __init__(
        self,
        fleet: Fleet,
        found: Mapping[Server, Found],
        publisher: VllmPublisher,
        timeout_s: float,
        access: Access,
    ) -> None:
        self._fleet, self._found, self._publisher = fleet, found, publisher
        self._timeout, self._access = timeout_s, access
        self._lost: queue.SimpleQueue[Server | None] = queue.SimpleQueue()
        self._left = dict.fromkeys(fleet.servers, RESTARTS)
        self._ending = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run, name="miles-vllm-watch")
        thread.start()
        self._fleet.on_failure = self._expect
        try:
            yield
        finally:
            self._ending.set()
            self._lost.put(None)
            thread.join()

    def _expect(self, server: Server) -> None:
        """A server was lost: whoever wants to sample waits for it, unless it has been lost too often."""
        if self._left[server] and not self._ending.is_set():
            self._left[server] -= 1
            log.warning("%s was lost (%s) and is brought back", server.name, server.reason)
            self._fleet.expect(server, f"it is being brought back, after: {server.reason}")
            self._lost.put(server)

    def _run(self) -> None:
        while (server := self._lost.get()) is not None:
            reason = server.reason
            try:
                self._bring_back(server)
            except MilesError as error:
                log.warning("%s does not come back: %s", server.name, error)
                self._fleet.hold(server, f"{reason}; it did not come back: {error}")

    def _bring_back(self, server: Server) -> None:
        found = self._found[server]
        if found.own is not None:
            with ServerRoutes(server.url, timeout_s=5) as routes:
                alive = found.own.exit_code is None and routes.healthy()
            if not alive:
                found.own.stop()
                found.own.start()
                found.own.wait_ready(self._timeout, self._ending.is_set)
        else:
            wait_joined(found, self._access, self._timeout, self._ending)
        if self._publisher.refresh(server):
            log.info("%s serves again, version %d", server.name, server.version)
