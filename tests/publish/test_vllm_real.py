"""Real vLLM computes what the learner computes after each publish: every parameter changed, tied and untied, and adapters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from miles.engine.fleet import Fleet, Server
from miles.engine.vllm_routes import GENERATE, ServerRoutes
from miles.errors import EngineError
from miles.learn.critic import weights_of
from miles.learn.tiny import tiny_model
from miles.publish.canary import Difference, Tolerance
from miles.publish.carriers import FileCarrier
from miles.publish.files import WeightFiles
from miles.publish.vllm import VllmPublisher
from miles.run.vllm import DTYPES
from miles.types import Canary, PolicyUpdate

pytestmark = pytest.mark.slow
IDS = tuple((7 * place + 3) % 32 for place in range(24))
TOLERANCE = Tolerance.of("fp32")


def logprobs(model: Any, ids: Sequence[int]) -> list[float]:
    with torch.no_grad():
        table = model(torch.tensor([list(ids)]), use_cache=False).logits[0].double().log_softmax(-1)
    return table[range(len(ids) - 1), list(ids[1:])].tolist()


def gap(a: Sequence[float], b: Sequence[float]) -> float:
    return Difference.between(a, b).worst


def other_model(like: Any, tied: bool, seed: int) -> Any:
    """As `like`, with noise on every parameter."""
    model = tiny_model("llama", tied, head_dim=32)
    model.load_state_dict(like.state_dict())
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def update_of(model: Any, version: int) -> PolicyUpdate:
    return PolicyUpdate(version, lambda: iter(weights_of(model).items()), Canary(IDS, lambda: logprobs(model, IDS)))


def publisher_for(served: Any, connect: Any = ServerRoutes, **keys: Any) -> tuple[Fleet, VllmPublisher]:
    fleet = Fleet([Server("server 0", served.server.url, places=64)])
    plan = served.server.plan
    files = WeightFiles(served.published, DTYPES[plan.dtype])
    return fleet, VllmPublisher(fleet, FileCarrier(files), connect, tolerance=Tolerance.of(plan.dtype), **keys)


def publish_three(served: Any, tied: bool, first: int, **keys: Any) -> tuple[Fleet, VllmPublisher]:
    """Three versions of every parameter; after each one the server computes what the learner does, and something new."""
    fleet, publisher = publisher_for(served, **keys)
    model = served.model
    with ServerRoutes(served.server.url) as routes:
        for version in range(first, first + 3):
            before = routes.logprobs(IDS)
            model = other_model(model, tied, version)
            publisher.publish(update_of(model, version))
            after = routes.logprobs(IDS)
            found, moved = Difference.between(after, logprobs(model, IDS)), Difference.between(after, before)
            assert Tolerance.of(served.server.plan.dtype).holds(found), found
            assert moved.mean > max(0.3, 4 * found.mean), moved
            assert routes.version() == str(version)
    return fleet, publisher


@pytest.mark.parametrize("kind", ["tied", "untied", "tied_bf16"])
def test_three_versions_of_every_parameter_reach_the_server(kind: str, request: pytest.FixtureRequest) -> None:
    served = request.getfixturevalue(f"served_{kind}")
    fleet, publisher = publish_three(served, kind != "untied", 11)
    assert fleet.servers[0].version == 13
    assert publisher.worst_difference is not None
    assert [path.name for path in served.published.glob("policy-*")] == ["policy-v13.safetensors"]


class KeepsItsWeights(ServerRoutes):
    """Calls its weights by the new version and does not take them."""

    def load_weights(self, file: Path, tensors: int, size: int, version: str) -> None:
        self.name_version(version)


def test_without_verification_a_publish_that_does_not_arrive_is_not_found_and_this_test_would_fail(
    served_tied: Any,
) -> None:
    with pytest.raises(EngineError, match="differ from the learner's by"):
        publish_three(served_tied, True, 41, connect=KeepsItsWeights)
    with pytest.raises(AssertionError, match="Difference"):
        publish_three(served_tied, True, 51, connect=KeepsItsWeights, verify=False)


def test_a_server_with_other_weights_than_the_learner_serves_nothing(served_tied: Any) -> None:
    fleet, publisher = publisher_for(served_tied)
    ours, theirs = (other_model(served_tied.model, True, seed) for seed in (1, 2))
    wrong = PolicyUpdate(21, lambda: iter(weights_of(theirs).items()), Canary(IDS, lambda: logprobs(ours, IDS)))
    with pytest.raises(EngineError, match=r"published to no server: server 0: .* differ from the learner's by"):
        publisher.publish(wrong)
    assert not fleet.servers[0].ready
    with ServerRoutes(served_tied.server.url) as routes:
        assert routes.version() == "unverified-21"
    publisher.publish(update_of(ours, 22))
    assert fleet.servers[0].ready


def adapter(model: Any, rank: int, seed: int, size: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            key = f"base_model.model.{name}"
            out[f"{key}.lora_A.weight"] = torch.randn(rank, module.in_features, generator=generator) * size
            out[f"{key}.lora_B.weight"] = torch.randn(module.out_features, rank, generator=generator) * size
    return out


def with_adapter(model: Any, tensors: dict[str, torch.Tensor], scale: float) -> Any:
    merged = tiny_model("llama", True, head_dim=32)
    merged.load_state_dict(model.state_dict())
    for name, module in merged.named_modules():
        key = f"base_model.model.{name}"
        if f"{key}.lora_A.weight" in tensors:
            module.weight.data += scale * tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
    return merged


@contextmanager
def sampling(url: str, model: str) -> Iterator[None]:
    """One request after the other to the server, under way when the block begins and when it ends; none fails."""
    answered: list[int] = []
    ending = threading.Event()
    body = {
        "token_ids": [3, 4, 5],
        "sampling_params": {"max_tokens": 48, "ignore_eos": True, "seed": 1},
        "model": model,
    }

    def run() -> None:
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=url.removeprefix("unix:")), timeout=60) as client:
            while not ending.is_set():
                answered.append(client.post(f"http://vllm{GENERATE}", json=body).status_code)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
    assert answered.count(200) == len(answered) > 0


def test_adapters_come_under_a_name_of_their_version_and_old_ones_go(served_adapters: Any) -> None:
    rank, alpha = 4, 8
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "lora_dropout": 0.0, "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    }  # fmt: skip
    fleet = Fleet([Server("server 0", served_adapters.server.url, places=64)])
    files = WeightFiles(served_adapters.published, torch.float32, config)
    publisher = VllmPublisher(fleet, FileCarrier(files), ServerRoutes, max_staleness=1, tolerance=TOLERANCE)
    learners = {}
    with ServerRoutes(served_adapters.server.url) as routes, ExitStack() as under_way:
        for version in (0, 1, 2, 3):
            tensors = adapter(served_adapters.model, rank, version, 0.0 if version == 0 else 0.3)
            learners[version] = with_adapter(served_adapters.model, tensors, alpha / rank)
            canary = Canary(IDS, partial(logprobs, learners[version], IDS))
            publisher.publish(
                PolicyUpdate(version, lambda: iter(()), canary, lambda tensors=tensors: iter(tensors.items()))
            )
            assert routes.adapters() == [v for v in (version - 1, version) if v >= 0]
            if version == 2:
                under_way.enter_context(sampling(served_adapters.server.url, "policy-v2"))
        for version in (2, 3):
            assert gap(routes.logprobs(IDS, version), logprobs(learners[version], IDS)) < 1e-3
        assert gap(routes.logprobs(IDS, 3), routes.logprobs(IDS, 2)) > 0.3
        publisher.publish(PolicyUpdate(3, lambda: iter(()), canary, lambda: iter(tensors.items())))  # again: no harm
        wrong = PolicyUpdate(
            4, lambda: iter(()), canary, lambda: iter(adapter(served_adapters.model, rank, 9, 0.3).items())
        )
        with pytest.raises(EngineError, match="differ from the learner's"):
            publisher.publish(wrong)
    assert not fleet.servers[0].ready
