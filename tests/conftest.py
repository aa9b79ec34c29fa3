"""For every test: threads that wait spin only briefly, or two test processes on two cores would take minutes for seconds.

And real vLLM servers of tiny models, each started when the first test asks for it and kept for the session.
The fixture `gang` runs a function of a test module on several ranks.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from miles.run.threads import prepare_process

prepare_process()


ADAPTED = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass
class Served:
    """A running server, the folder it reads weights from, and the model that it was started with."""

    server: Any
    folder: Path  # of the model
    published: Path
    model: Any

    def give_start_weights(self, routes: Any, version: str) -> None:
        """Serve the model's own weights as `version`, whatever a test before has loaded."""
        from safetensors.torch import save_file

        from miles.learn.critic import weights_of

        if routes.version() == "default":
            routes.prepare_weights()
        file, weights = self.published / "start.safetensors", weights_of(self.model)
        save_file(weights, file)
        routes.load_weights(file, len(weights), file.stat().st_size, version)


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter that has vLLM. Skips where there is none: `make setup-vllm`, which `make test` calls, makes it."""
    from miles.engine.vllm_flags import find_python
    from miles.engine.vllm_server import check_installed
    from miles.errors import ConfigError

    python = find_python(os.environ.get("MILES__ENGINE__PYTHON"))
    try:
        check_installed(python)
    except ConfigError as error:
        pytest.skip(str(error))
    return python


@pytest.fixture(scope="session")
def serve_tiny(vllm_python: str, tmp_path_factory: Any) -> Iterator[Callable[..., Served]]:
    """`serve_tiny(name, tied, adapters=None, dtype="fp32")`: a server of a tiny peaked Llama whose head size vLLM knows."""
    from miles.engine.vllm_flags import ServerPlan
    from miles.engine.vllm_server import VllmServer
    from miles.learn.export import export
    from miles.learn.tiny import tiny_model, tiny_tokenizer

    running = []
    with tempfile.TemporaryDirectory(prefix="miles-vllm-") as sockets:

        def serve(name: str, tied: bool, adapters: Any = None, dtype: str = "fp32") -> Served:
            folder = tmp_path_factory.mktemp(name)
            model = tiny_model("llama", tied, head_dim=32)
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.data.mul_(4)
            export(model, tiny_tokenizer(), folder / "model")
            published = folder / "published"
            published.mkdir()
            plan = ServerPlan(
                str(folder / "model"), None, dtype, 64, None, 0.25, published, threads=1, adapters=adapters
            )
            server = VllmServer(plan, vllm_python, Path(sockets), folder / "vllm.log", name)
            running.append(server)
            server.start()
            server.wait_ready(300)
            return Served(server, folder / "model", published, model)

        try:
            yield serve
        finally:
            for server in running:
                server.stop()


@pytest.fixture(scope="session")
def served_tied(serve_tiny: Callable[..., Served]) -> Served:
    return serve_tiny("tied", True)


@pytest.fixture(scope="session")
def served_untied(serve_tiny: Callable[..., Served]) -> Served:
    return serve_tiny("untied", False)


@pytest.fixture(scope="session")
def served_tied_bf16(serve_tiny: Callable[..., Served]) -> Served:
    return serve_tiny("tied_bf16", True, dtype="bf16")


@pytest.fixture(scope="session")
def served_adapters(serve_tiny: Callable[..., Served]) -> Served:
    from miles.engine.vllm_flags import AdapterSlots

    return serve_tiny("adapters", True, AdapterSlots(rank=4, count=3, targets=ADAPTED))


class Gang:
    """Runs a function of a test module on several gloo ranks at once, each a process of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed.tensor", "miles.learn.learner", "miles.learn.writer"])
        self._calls = 0

    def run(self, size: int, function: Callable[..., Any], *arguments: Any, limit_s: float = 120) -> list[Any]:
        """What each rank returned, in the order of ranks; arguments and results are JSON."""
        self._calls += 1
        place = self._folder / f"gang-{self._calls}"
        place.mkdir()
        processes = [self._start(place, size, rank, function, arguments) for rank in range(size)]
        for process in processes:
            process.join(limit_s)
            process.kill()
        assert [process.exitcode for process in processes] == [0] * size
        return [json.loads((place / f"result-{rank}").read_text(encoding="utf-8")) for rank in range(size)]

    def _start(self, place: Path, size: int, rank: int, function: Callable[..., Any], arguments: Any) -> Any:
        job = {
            "size": size, "rank": rank, "module": function.__code__.co_filename, "function": function.__name__,
            "arguments": arguments, "store": str(place / "store"), "result": str(place / f"result-{rank}"),
        }  # fmt: skip
        child = str(Path(__file__).with_name("gang_child.py"))
        process = self._context.Process(target=runpy.run_path, args=(child,), kwargs={"init_globals": {"job": job}})
        process.start()
        return process


@pytest.fixture
def gang(tmp_path: Path) -> Gang:
    return Gang(tmp_path)
