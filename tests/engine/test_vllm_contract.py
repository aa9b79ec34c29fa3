"""The engine contract against a fake server in this process and against real vLLM."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from miles.engine.fleet import Fleet, Server
from miles.engine.joining import Service
from miles.engine.vllm_client import VllmEngine
from miles.engine.vllm_routes import Access, ServerRoutes
from miles.learn.tiny import CONTEXT, tiny_tokenizer

behind, contract = (sys.modules[f"miles_engine_{name}"] for name in ("behind", "contract"))


def fleet_at(version: int, *urls: str) -> Fleet:
    fleet = Fleet([Server(f"server {i}", url, places=64) for i, url in enumerate(urls)])
    for server in fleet.servers:
        fleet.serve(server, version)
    return fleet


def maker(url: str, vocabulary: int, **fixed: Any) -> Callable[..., VllmEngine]:
    def make(end_token_ids: Any = (), **keys: Any) -> VllmEngine:
        return VllmEngine(
            fleet_at(3, url), tiny_tokenizer(), end_token_ids=end_token_ids, context=CONTEXT, vocabulary=vocabulary,
            adapters=False, **fixed, **keys,
        )  # fmt: skip

    return make


class TestVllmEngineWithAFakeServer(contract.EngineContract):
    @pytest.fixture
    def bench(self, peaked: Callable[..., Any], fake_vllm: Any) -> Any:
        model = peaked("llama")
        fake = fake_vllm(model, tiny_tokenizer())
        make = maker("http://fake", model.config.vocab_size, connect=fake.connect)
        return contract.Bench(model, tiny_tokenizer(), make, CONTEXT, draws=600)


@pytest.mark.slow
class TestVllmEngineWithRealVllm(contract.EngineContract):
    """Through a port with a token, as `miles serve` has one."""

    @pytest.fixture
    def bench(self, served_tied: Any) -> Iterator[Any]:
        access = Access("0123456789abcdef0123", "run")
        with behind.port({"vllm-0": served_tied.server.url}, served_tied.published, [access.token]) as url:
            service = Service(url, access)
            service.join(0)
            with ServerRoutes(service.server_url("vllm-0"), access) as routes:
                served_tied.give_start_weights(routes, "3")
            make = maker(service.server_url("vllm-0"), served_tied.model.config.vocab_size, access=access)
            yield contract.Bench(served_tied.model, tiny_tokenizer(), make, CONTEXT, draws=400, deterministic=False)
