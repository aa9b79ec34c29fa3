"""Tokens per second of one vLLM server: through the engine and the port of Miles, and driven directly on the same prompts.

The direct driver sends the same requests over the server's own socket with a plain HTTP client, all at once, and reads the answers;
it checks nothing. Rounds alternate, and ratios are taken within a round, because machines are noisy.

    python benchmarks/rollout/client.py [--model NAME] [--samples 64] [--tokens 64] [--rounds 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from miles.engine.fleet import Fleet, Server
from miles.engine.joining import Service
from miles.engine.port import Port, ServiceFacts
from miles.engine.vllm_client import VllmEngine
from miles.engine.vllm_routes import GENERATE, Access, ServerRoutes, async_client, request_body
from miles.run.prepare import Inputs, prepare
from miles.run.recipes import inspect
from miles.run.servers import Servers, own_servers, wait_ready
from miles.types import Sampling
from miles.web.door import Doorkeeper
from miles.web.listen import listening, make_server

TOKEN = "a token of the benchmark"
GROUP = 8
SETTINGS = {"data.source": "task:addition", "algorithm.steps": 1, "engine.kind": "vllm", "engine.context": 512}


@contextmanager
def port_before(servers: Servers) -> Iterator[str]:
    """The address of a port before the servers, in a thread of this process."""
    facts = ServiceFacts([], str(servers.root), "")
    sockets = {one.name: one.url for one in servers.found}
    port = Port(sockets, Doorkeeper([TOKEN], ""), servers.root, lambda run: facts, lambda run, offer: servers.root)
    with listening("127.0.0.1", 0) as listener:
        server = make_server(port.app(), None, None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


async def direct(url: str, prompts: Sequence[Sequence[int]], sampling: Sampling) -> int:
    """Sampled tokens."""
    async with async_client(url) as client:

        async def ask(number: int) -> int:
            body = request_body(prompts[number // GROUP], sampling, number, (), None)
            answer = await client.post(GENERATE, json=body)
            return len(answer.json()["choices"][0]["token_ids"])

        return sum(await asyncio.gather(*(ask(number) for number in range(GROUP * len(prompts)))))


async def through_miles(engine: VllmEngine, prompts: Sequence[Sequence[int]], sampling: Sampling) -> int:
    calls = [engine.generate(ids, GROUP, sampling, range(GROUP * i, GROUP * (i + 1))) for i, ids in enumerate(prompts)]
    return sum(len(one.token_ids) for answers in await asyncio.gather(*calls) for one in answers)


def measure(inputs: Inputs, servers: Servers, options: argparse.Namespace) -> list[dict[str, float]]:
    """Tokens per second of both, for each round."""
    (found,) = servers.found
    sampling = Sampling(options.tokens, 1.0)
    prompts = [inputs.renderer.prompt(row).ids for row in inputs.train[: options.samples // GROUP]]
    with port_before(servers) as url, ServerRoutes(found.url) as routes:
        routes.name_version("0")
        access = Access(TOKEN, "benchmark")
        service = Service(url, access)
        service._post("/join", {"run": access.run})
        fleet = Fleet([Server(found.name, service.server_url(found.name), found.places)])
        fleet.serve(fleet.servers[0], 0)
        engine = VllmEngine(
            fleet, inputs.tokenizer, end_token_ids=(), context=512, adapters=False, access=access,
            vocabulary=inputs.config.get_text_config().vocab_size,
        )  # fmt: skip
        ways: dict[str, Any] = {
            "direct": lambda: direct(found.url, prompts, sampling),
            "miles": lambda: through_miles(engine, prompts, sampling),
        }
        asyncio.run(ways["direct"]())  # what is done once: prompts are cached for both
        rounds = []
        for number in range(options.rounds):
            order = list(ways) if number % 2 else list(ways)[::-1]
            rounds.append({name: _rate(ways[name]) for name in order})
            shown = ", ".join(f"{name} {rate:.0f}" for name, rate in rounds[-1].items())
            print(
                f"round {number + 1}: {shown} tokens/s, ratio {rounds[-1]['miles'] / rounds[-1]['direct']:.3f}",
                flush=True,
            )
        return rounds


def _rate(way: Any) -> float:
    started = time.perf_counter()
    return asyncio.run(way()) / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    resolved = inspect([], {**SETTINGS, "model.name": options.model}, {})
    inputs = prepare(resolved.recipe, resolved.row)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="miles-bench-")))
        servers = stack.enter_context(own_servers(resolved.recipe, inputs.tokenizer, folder))
        wait_ready(servers, 600)
        rounds = measure(inputs, servers, options)
    ratio = statistics.median(one["miles"] / one["direct"] for one in rounds)
    print(f"median ratio: {ratio:.3f}")
    if options.json:
        options.json.write_text(json.dumps({"rounds": rounds, "ratio": ratio}))


if __name__ == "__main__":
    main()
