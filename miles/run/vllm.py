"""The vLLM servers of a run: started or found, watched, given weights, and brought back when one dies."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from miles.config.schema import Recipe
from miles.engine.fleet import Fleet, Server
from miles.engine.vllm_client import VllmEngine
from miles.engine.vllm_flags import AdapterSlots, ServerPlan, find_python
from miles.engine.vllm_routes import ServerRoutes
from miles.engine.vllm_server import VllmServer, check_installed
from miles.errors import EngineError
from miles.learn.adapters import peft_config
from miles.learn.export import export
from miles.learn.learner import Learner
from miles.learn.load import context_length, load_model
from miles.learn.locate import locate
from miles.learn.tiny import PREFIX
from miles.publish.canary import Tolerance
from miles.publish.files import WeightFiles
from miles.publish.vllm import VllmPublisher
from miles.run.prepare import Inputs

log = logging.getLogger(__name__)

CANARY = 32  # tokens that servers and learner compute at each version
RESTARTS = 3  # of each server in one run
TOKEN_VARIABLE = "MILES_ENGINE_TOKEN"
SHARED_MEMORY = Path("/dev/shm")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@contextmanager
def open_vllm(
    recipe: Recipe, inputs: Inputs, learner: Learner, run_dir: Path
) -> Iterator[tuple[VllmEngine, VllmPublisher]]:
    """Servers that serve the learner's version. Raises ConfigError and EngineError where they cannot."""
    engine, dtype = recipe.engine, serving_dtype(recipe)
    adapter = peft_config(learner.model, "actor") if recipe.lora.rank else None
    learner.canary_ids = canary_ids(inputs)
    with ExitStack() as stack:
        root = stack.enter_context(_publish_root(recipe, learner, run_dir))
        own: list[VllmServer] = []
        if not engine.urls:
            slots = adapter_slots(recipe, adapter) if adapter is not None else None
            own = _own_servers(recipe, inputs, run_dir, root, slots, stack)
        urls = [(server.name, server.url) for server in own] or [(url, url) for url in engine.urls]
        fleet = Fleet([Server(name, url, engine.max_batch) for name, url in urls], engine.start_timeout_s)
        token = os.environ.get(TOKEN_VARIABLE)
        publisher = VllmPublisher(
            fleet, WeightFiles(root, DTYPES[dtype], adapter), partial(ServerRoutes, token=token),
            max_staleness=recipe.buffer.max_staleness, verify=recipe.publish.verify, tolerance=Tolerance.of(dtype),
        )  # fmt: skip
        _wait_ready(own, engine.start_timeout_s)
        publisher.publish(learner.policy_update())
        watch = Watch(fleet, dict(zip(fleet.servers, own, strict=False)), publisher, engine.start_timeout_s, token)
        stack.enter_context(watch.running())
        config = inputs.config.get_text_config()
        yield (
            VllmEngine(
                fleet, inputs.tokenizer, end_token_ids=inputs.sampling.stop_token_ids,
                context=engine.context or context_length(inputs.config), vocabulary=config.vocab_size,
                adapters=adapter is not None, stall_s=engine.stall_s, token=token,
            ),
            publisher,
        )  # fmt: skip


def canary_ids(inputs: Inputs) -> list[int]:
    """A rendered prompt of the run, and then ids from all over the vocabulary: `CANARY` tokens in all."""
    prompt = list(inputs.renderer.prompt(inputs.train[0]).ids)[: CANARY // 2]
    vocabulary = inputs.config.get_text_config().vocab_size
    return prompt + [(7919 * place + 17) % vocabulary for place in range(CANARY - len(prompt))]


def serving_dtype(recipe: Recipe) -> str:
    """fp32 or bf16: what `engine.param_dtype = "auto"` stands for."""
    return recipe.learner.param_dtype if recipe.engine.param_dtype == "auto" else recipe.engine.param_dtype


def adapter_slots(recipe: Recipe, adapter: Mapping[str, Any]) -> AdapterSlots:
    """Room for the versions that may be sampled from at the same time, and the next. `adapter`: its peft config."""
    names = sorted({str(target).rpartition(".")[2] for target in adapter["target_modules"]})
    return AdapterSlots(adapter["r"], recipe.buffer.max_staleness + 2, tuple(names))


def _own_servers(
    recipe: Recipe, inputs: Inputs, run_dir: Path, root: Path, slots: AdapterSlots | None, stack: ExitStack
) -> list[VllmServer]:
    """Start the servers; they become ready while others are started too, and end with the stack."""
    engine = recipe.engine
    python = find_python(engine.python)
    log.info("vLLM %s runs with %s", check_installed(python), python)
    sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="miles-vllm-")))
    plan = ServerPlan(
        *_model_place(recipe, inputs, run_dir), serving_dtype(recipe), engine.max_batch, engine.context,
        engine.kv_cache_gib, root, threads=recipe.run.threads or 1,
        adapters=slots, cpu=not torch.cuda.is_available(), trust_remote_code=recipe.model.trust_remote_code,
    )  # fmt: skip
    servers = []
    for number in range(engine.servers):
        name = f"vllm-{number}"
        server = VllmServer(plan, python, sockets, run_dir / "logs" / f"{name}.log", name)
        stack.callback(server.stop)
        server.start()
        servers.append(server)
    return servers


def _model_place(recipe: Recipe, inputs: Inputs, run_dir: Path) -> tuple[str, str | None]:
    """(folder or hub id, commit) that a server loads its start weights and its tokenizer from."""
    if recipe.model.name.startswith(PREFIX):
        model = load_model(recipe.model, seed=recipe.run.seed)
        return str(export(model, inputs.tokenizer, run_dir / "served")), None
    source = locate(recipe.model)
    return source.place, source.commit


@contextmanager
def _publish_root(recipe: Recipe, learner: Learner, run_dir: Path) -> Iterator[Path]:
    """`publish.directory`, or a folder in memory where it has room for two versions, or one in the run directory."""
    if recipe.publish.directory is not None:
        yield Path(recipe.publish.directory).expanduser().resolve()
        return
    size = sum(parameter.numel() * 4 for parameter in learner.model.parameters())
    room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * size
    with tempfile.TemporaryDirectory(prefix="miles-publish-", dir=SHARED_MEMORY if room else run_dir) as folder:
        yield Path(folder)


def _wait_ready(servers: list[VllmServer], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for server in servers:
        server.wait_ready(max(1.0, deadline - time.monotonic()))


class Watch:
    """Brings servers back: starts own ones again, waits for others, and gives them the newest weights before they serve."""

    def __init__(
        self,
        fleet: Fleet,
        own: Mapping[Server, VllmServer],
        publisher: VllmPublisher,
        timeout_s: float,
        token: str | None,
    ) -> None:
        self._fleet, self._own, self._publisher = fleet, own, publisher
        self._timeout, self._token = timeout_s, token
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
            except EngineError as error:
                log.warning("%s does not come back: %s", server.name, error)
                self._fleet.hold(server, f"{reason}; it did not come back: {error}")

    def _bring_back(self, server: Server) -> None:
        process = self._own.get(server)
        if process is not None:
            with ServerRoutes(server.url, timeout_s=5) as routes:
                alive = process.exit_code is None and routes.healthy()
            if not alive:
                process.stop()
                process.start()
                process.wait_ready(self._timeout, self._ending.is_set)
        else:
            self._wait_for(server)
        if self._publisher.refresh(server):
            log.info("%s serves again, version %d", server.name, server.version)

    def _wait_for(self, server: Server) -> None:
        deadline = time.monotonic() + self._timeout
        with ServerRoutes(server.url, self._token, timeout_s=5) as routes:
            while not routes.healthy():
                if time.monotonic() > deadline or self._ending.wait(1.0):
                    raise EngineError(f"nobody answered at {server.url} for {self._timeout:g} s")
