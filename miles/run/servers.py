"""Where a run's vLLM servers come from: started on this machine as the recipe says, or joined at a service that has them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from miles.config.schema import Recipe
from miles.engine.joining import TOKEN_VARIABLE, Needs, Service, check_fit, shared_folder
from miles.engine.port import SILENT_S
from miles.engine.vllm_flags import BACKEND, AdapterSlots, ServerPlan, find_python
from miles.engine.vllm_routes import NOTHING_TO_SHOW, Access, ServerRoutes
from miles.engine.vllm_server import VllmServer, check_installed
from miles.errors import ConfigError, EngineError, MilesError, ServerFault
from miles.learn.adapters import target_paths
from miles.learn.export import export
from miles.learn.load import context_length, load_config, load_model
from miles.learn.locate import locate
from miles.learn.tiny import PREFIX
from miles.publish.shelf import Shelf
from miles.publish.vllm_native import IPC_BACKEND
from miles.web.listen import read_tokens

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
BACKENDS = {"nccl": "nccl", "ipc": IPC_BACKEND}
"""What servers take full weights with where they do not come as files."""
RUN_FOLDER = "run-{run}"
"""What a run writes into the folder of a service, which deletes it when another run has joined."""
_OF_THE_RUN = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


@dataclass(frozen=True)
class Found:
    """One server: its name, address, how many samples it decodes at the same time, and what brings it back."""

    name: str
    url: str
    places: int
    own: VllmServer | None = None
    service: Service | None = None


@dataclass(frozen=True)
class Servers:
    """The servers of a run, and the folder that they read new weights from."""

    found: tuple[Found, ...]
    root: Path
    shelf: Shelf | None = None  # where servers without a disk in common take new weights from
    access: Access = field(default=NOTHING_TO_SHOW)


@contextmanager
def own_servers(recipe: Recipe, tokenizer: Any, folder: Path) -> Iterator[Servers]:
    """Processes of this machine, started and not yet ready, which end with the block.

    Raises ConfigError where vLLM cannot be started.
    """
    engine, python = recipe.engine, find_python(recipe.engine.python)
    log.info("vLLM %s runs with %s", check_installed(python), python)
    with ExitStack() as stack:
        root = stack.enter_context(_publish_root(recipe, folder))
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="miles-vllm-")))
        plan = server_plan(recipe, *_model_place(recipe, tokenizer, folder), root)
        servers = []
        for number in range(engine.servers):
            name = f"vllm-{number}"
            server = VllmServer(plan, python, sockets, folder / "logs" / f"{name}.log", name)
            stack.callback(server.stop)
            server.start()
            servers.append(Found(name, server.url, engine.max_batch, server))
        yield Servers(tuple(servers), root)


@contextmanager
def joined_servers(recipe: Recipe, config: Any, folder: Path) -> Iterator[Servers]:
    """Servers of the services at `engine.url`, which are this run's alone until the block ends.

    With `publish.serve` new weights lie on a shelf of this machine, otherwise in the services' folder.

    Raises BadInput where they do not fit this run, EngineError where they cannot be had.
    """
    access, needs, wanted = access_of(recipe), needs_of(recipe, config), recipe.publish.directory
    found: list[Found] = []
    folders: dict[Path, str] = {}
    with ExitStack() as stack:
        for number, url in enumerate(recipe.engine.url):
            service = Service(url, access)
            facts = service.join(SILENT_S + 5.0)
            stack.callback(service.leave)
            check_fit(url, facts, needs)
            if recipe.publish.serve is None:
                shared = shared_folder(url, facts, None if wanted is None else Path(wanted).expanduser())
                folders.setdefault(shared, url)
            prefix = f"{number}/" if len(recipe.engine.url) > 1 else ""
            found += [
                Found(prefix + one.name, service.server_url(one.name), one.places, service=service)
                for one in facts.servers
            ]
        if len(folders) > 1:
            listed = ", ".join(f"{url} reads {folder}" for folder, url in folders.items())
            raise ConfigError(
                f"engine.url names services with different folders for new weights ({listed}): start them with the same "
                "--publish.directory"
            )
        shelf = None
        if recipe.publish.serve is not None:
            root = stack.enter_context(_publish_root(recipe, folder))
            shelf = Shelf(root)
            stack.enter_context(shelf.serving(recipe.publish.serve))
        else:
            root = next(iter(folders)) / RUN_FOLDER.format(run=access.run)
            stack.callback(shutil.rmtree, root, ignore_errors=True)
        stack.enter_context(_staying([server.service for server in found if server.service is not None]))
        yield Servers(tuple(found), root, shelf, access)


@contextmanager
def _staying(services: Sequence[Service]) -> Iterator[None]:
    """Give signs of life while the learner is busy with something else."""
    ending = threading.Event()

    def run() -> None:
        while not ending.wait(SILENT_S / 4):
            for service in dict.fromkeys(services):
                try:
                    service.stay()
                except MilesError as error:
                    log.warning("%s", error)

    thread = threading.Thread(target=run, name="miles-stay")
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def access_of(recipe: Recipe) -> Access:
    """What this run shows at its services. Raises BadInput."""
    engine = recipe.engine
    tokens = read_tokens(None if engine.token_file is None else Path(engine.token_file), os.environ, TOKEN_VARIABLE)
    name = recipe.buffer.run or uuid.uuid4().hex
    return Access(tokens[0] if tokens else None, name, None if engine.ca_file is None else Path(engine.ca_file))


def needs_of(recipe: Recipe, config: Any) -> Needs:
    return Needs(
        recipe.model.name, model_digest(config), serving_dtype(recipe), recipe.engine.context or context_length(config),
        adapter_slots(recipe),
    )  # fmt: skip


def adapter_slots(recipe: Recipe) -> AdapterSlots | None:
    """Room for the versions that may be sampled from at the same time, and the next. None: full weights are trained."""
    rank = recipe.lora.rank
    if rank is None:
        return None
    paths = target_paths(_empty_model(recipe), recipe.lora.targets)
    return AdapterSlots(
        rank, recipe.buffer.max_staleness + 2, tuple(sorted({path.rpartition(".")[2] for path in paths}))
    )


def _empty_model(recipe: Recipe) -> Any:
    """The model without memory: its shapes and the names of its layers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            load_config(recipe.model), trust_remote_code=recipe.model.trust_remote_code
        )


def model_digest(config: Any) -> str:
    """SHA-256 of what a model's config says about its shape and computation."""
    told = {key: value for key, value in config.to_dict().items() if key not in _OF_THE_RUN}
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()


def serving_dtype(recipe: Recipe) -> str:
    """fp32 or bf16: what `engine.param_dtype = "auto"` stands for."""
    return recipe.learner.param_dtype if recipe.engine.param_dtype == "auto" else recipe.engine.param_dtype


def server_plan(recipe: Recipe, model: str, revision: str | None, root: Path) -> ServerPlan:
    engine = recipe.engine
    return ServerPlan(
        model, revision, serving_dtype(recipe), engine.max_batch, engine.context, engine.kv_cache_gib, root,
        threads=recipe.run.threads or 1, adapters=adapter_slots(recipe),
        cpu=not torch.cuda.is_available(), trust_remote_code=recipe.model.trust_remote_code,
        backend=BACKENDS.get(recipe.publish.kind, BACKEND),
    )  # fmt: skip


def wait_ready(servers: Servers, timeout_s: float, ending: threading.Event | None = None) -> None:
    """Until every server answers, and nothing of another run is left there. Raises EngineError, also once `ending` is set."""
    ending = ending or threading.Event()
    deadline = time.monotonic() + timeout_s
    for server in servers.found:
        left = max(1.0, deadline - time.monotonic())
        if server.own is not None:
            server.own.wait_ready(left, ending.is_set)
        else:
            wait_joined(server, servers.access, left, ending)


def wait_joined(server: Found, access: Access, timeout_s: float, ending: threading.Event) -> None:
    """Until the service has (brought back) the server, and is ours again where it was started anew itself."""
    deadline = time.monotonic() + timeout_s
    with ServerRoutes(server.url, access, timeout_s=5) as routes:
        while not routes.healthy():
            if time.monotonic() > deadline or ending.wait(1.0):
                raise EngineError(f"no server answered at {server.url} for {timeout_s:g} s (engine.start_timeout_s)")
    if server.service is not None:
        server.service.stay()
    try:
        with ServerRoutes(server.url, access) as routes:
            for version in routes.adapters():
                routes.unload_adapter(version)
            routes.forget_prefixes()  # keys and values that were computed with another run's adapters
    except ServerFault as fault:
        log.warning("%s: %s", server.name, fault)  # the publish that follows judges it


def _model_place(recipe: Recipe, tokenizer: Any, folder: Path) -> tuple[str, str | None]:
    """(folder or hub id, commit) that a server loads its start weights and its tokenizer from."""
    if recipe.model.name.startswith(PREFIX):
        model = load_model(recipe.model, seed=recipe.run.seed)
        return str(export(model, tokenizer, folder / "served")), None
    source = locate(recipe.model)
    return source.place, source.commit


@contextmanager
def _publish_root(recipe: Recipe, folder: Path) -> Iterator[Path]:
    """`publish.directory`, or a folder in memory where it has room for three versions, or one in the run directory."""
    if recipe.publish.directory is not None:
        yield Path(recipe.publish.directory).expanduser().resolve()
        return
    size = sum(4 * parameter.numel() for parameter in _empty_model(recipe).parameters())
    room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * size
    with tempfile.TemporaryDirectory(prefix="miles-publish-", dir=SHARED_MEMORY if room else folder) as made:
        yield Path(made)
