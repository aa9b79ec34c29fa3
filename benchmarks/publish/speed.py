"""Seconds that a publish to a real vLLM server takes, part by part, and how long generation stands still meanwhile.

    python benchmarks/publish/speed.py [MODEL] [--kinds adapter files] [--publishes 8] [--threads 2] [--json FILE]

`adapter`: a LoRA adapter of all linear layers, published while samples are decoded, and while none is. `files`: all weights.
A publish is what the loop waits for: writing, loading, the canary's log-probabilities by the server and beside it by the learner,
comparing, unloading. Every version differs from the one before. Generation stands still for the longest time between two
steps of samples under way that reaches into a publish, less the usual time of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2
import torch

from miles.engine.fleet import Fleet, Server
from miles.engine.vllm_flags import ServerPlan, find_python
from miles.engine.vllm_routes import ADAPTER, ServerRoutes
from miles.engine.vllm_server import VllmServer
from miles.errors import EngineError
from miles.learn.adapters import peft_config
from miles.learn.learner import Learner
from miles.learn.load import load_model
from miles.learn.locate import locate
from miles.publish.canary import Tolerance
from miles.publish.carriers import FileCarrier
from miles.publish.files import WeightFiles
from miles.publish.vllm import VllmPublisher
from miles.run.recipes import inspect
from miles.run.servers import adapter_slots
from miles.run.vllm import CANARY

RANK = 16
CONTEXT = 512
TOGETHER_S = 0.002  # tokens of one step come within that
SETTINGS = {
    "data.source": "task:addition", "algorithm.name": "grpo", "algorithm.steps": 100, "buffer.max_staleness": 1,
}  # fmt: skip


class Timed:
    """Routes whose calls are timed, by name."""

    def __init__(self, routes: ServerRoutes, seconds: dict[str, list[float]]) -> None:
        self._routes, self._seconds = routes, seconds

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._routes, name)

        def call(*arguments: Any, **keys: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*arguments, **keys)
            finally:
                self._seconds[name].append(time.perf_counter() - started)

        return call


class Stream:
    """Samples of one prompt, decoded at the same time in a thread; remembers when each step's tokens came."""

    def __init__(self, server: VllmServer, model: str, samples: int) -> None:
        self._steps: list[float] = []
        self._body = {
            "model": model, "prompt": list(range(10, 40)), "max_tokens": CONTEXT - 31, "n": samples, "temperature": 1.0,
            "ignore_eos": True, "stream": True,
        }  # fmt: skip
        transport = httpx2.HTTPTransport(uds=server.url.removeprefix("unix:"))
        self._client = httpx2.Client(transport=transport, base_url="http://vllm", timeout=120)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Stream:
        self._thread.start()
        self.more()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._client.close()

    def more(self, steps: int = 8) -> None:
        """Wait for that many steps."""
        wanted = len(self._steps) + steps
        while len(self._steps) < wanted:
            assert self._thread.is_alive(), "the samples ended before the publish"
            time.sleep(0.01)

    def _run(self) -> None:
        with self._client.stream("POST", "/v1/completions", json=self._body) as answer:
            for line in answer.iter_lines():
                now = time.perf_counter()
                if line.startswith("data: {") and now - max(self._steps, default=0.0) > TOGETHER_S:
                    self._steps.append(now)
                if self._ending.is_set():
                    return

    def still(self, start: float, end: float) -> float:
        """Seconds: the longest time between two steps that reaches into [start, end], less the usual one."""
        gaps = [(a, b) for a, b in zip(self._steps, self._steps[1:], strict=False)]
        inside = [b - a for a, b in gaps if b > start and a < end]
        return max(0.0, max(inside) - statistics.median(b - a for a, b in gaps if b <= start or a >= end))


def learner_of(model: str, rank: int | None, threads: int) -> Learner:
    """A learner whose policy differs from the base at once."""
    settings = {**SETTINGS, "model.name": model, "lora.rank": rank, "run.threads": threads}
    recipe = inspect([], settings, {}).recipe
    learner = Learner(load_model(recipe.model, seed=0), recipe, device="cpu")
    learner.canary_ids = [(7919 * place + 17) % learner.model.config.vocab_size for place in range(CANARY)]
    return learner


def move(learner: Learner) -> None:
    """The next version: every trained parameter differs a little."""
    learner.version += 1
    generator = torch.Generator().manual_seed(learner.version)
    with torch.no_grad():
        for parameter in learner.roles.trained("actor").values():
            parameter.add_(2e-4 * torch.randn(parameter.shape, generator=generator))


@contextmanager
def served(learner: Learner, kind: str, threads: int) -> Iterator[tuple[VllmServer, Path]]:
    shm = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=shm) as published:
        slots = adapter_slots(learner.recipe) if kind == "adapter" else None
        source = locate(learner.recipe.model)
        plan = ServerPlan(
            source.place, source.commit, "fp32", 64, CONTEXT, 1.0, Path(published), threads=threads, adapters=slots
        )
        server = VllmServer(plan, find_python(None), Path(folder), Path(folder) / "vllm.log")
        server.start()
        try:
            server.wait_ready(600)
            yield server, Path(published)
        except EngineError:
            print(server.log_file.read_text(), flush=True)
            raise
        finally:
            server.stop()


@dataclass
class Result:
    """Seconds of each publish, of its parts, and that generation stood still (empty where none ran)."""

    whole: list[float]
    parts: dict[str, list[float]]
    still: list[float]

    def show(self, name: str) -> None:
        print(f"\n{name}: {spread(self.whole)} s a publish", flush=True)
        for part, seconds in self.parts.items():
            print(f"  {part:<18}{spread(seconds)} s, {len(seconds) / len(self.whole):.3g} a publish")
        if self.still:
            print(f"  {'standing still':<18}{spread(self.still)} s")


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f} to {max(seconds):.3f})"


def measure(learner: Learner, server: VllmServer, folder: Path, kind: str, publishes: int, samples: int) -> Result:
    """`samples`: decoded at the same time as the publishes; 0: none. The first publish warms up and is not counted."""
    result = Result([], defaultdict(list), [])
    fleet = Fleet([Server("vllm-0", server.url, 64)])
    (place,) = fleet.servers
    files = WeightFiles(folder, torch.float32, peft_config(learner.model, "actor") if kind == "adapter" else None)
    publisher = VllmPublisher(
        fleet, FileCarrier(files), lambda url: Timed(ServerRoutes(url), result.parts), tolerance=Tolerance.of("fp32")
    )
    for number in range(publishes + 1):
        result.parts = result.parts if number > 1 else defaultdict(list)
        model = ADAPTER.format(version=place.version) if kind == "adapter" else server.plan.model
        place.using[place.version] += 1  # as the client does, so that the version stays
        with Stream(server, model, samples) if samples and number else nullcontext() as stream:
            started, ended = publish_next(learner, publisher)
            if stream is not None:
                stream.more()
        place.using.clear()
        if number:
            result.whole.append(ended - started)
            result.still += [stream.still(started, ended)] if stream is not None else []
        time.sleep(0.2)
    return result


def publish_next(learner: Learner, publisher: VllmPublisher) -> tuple[float, float]:
    """When the publish of the next version began and ended."""
    move(learner)
    started = time.perf_counter()
    publisher.publish(learner.policy_update())
    return started, time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m-instruct-q4")
    parser.add_argument("--kinds", nargs="+", default=["adapter", "files"], choices=["adapter", "files"])
    parser.add_argument("--publishes", type=int, default=8)
    parser.add_argument("--samples", type=int, nargs="+", default=[0, 4], help="decoded at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of the server, and of the learner")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    results = {}
    for kind in arguments.kinds:
        learner = learner_of(arguments.model, RANK if kind == "adapter" else None, arguments.threads)
        with served(learner, kind, arguments.threads) as (server, folder):
            for samples in arguments.samples:
                name = f"{kind}, {samples} samples under way"
                results[name] = measure(learner, server, folder, kind, arguments.publishes, samples)
                results[name].show(name)
    if arguments.json:
        arguments.json.write_text(json.dumps({name: asdict(result) for name, result in results.items()}, indent=1))


if __name__ == "__main__":
    main()
