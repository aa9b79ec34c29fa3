"""What the client makes of servers that fail: another one answers, or one clear error; never half an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from miles.engine.fleet import Fleet, Server
from miles.engine.vllm_client import VllmEngine
from miles.errors import EngineError
from miles.learn.tiny import CONTEXT, tiny_tokenizer
from miles.types import Sampling, VersionSpan

PROMPT = (5, 9, 4, 17)


class Pair:
    """Two fake servers at version 3, and an engine over both."""

    def __init__(self, model: Any, fake: Any, **keys: Any) -> None:
        self.fakes = [fake(model, tiny_tokenizer()) for _ in range(2)]
        self.fleet = Fleet([Server(f"server {i}", f"http://{i}", places=8) for i in range(2)])
        for server in self.fleet.servers:
            self.fleet.serve(server, 3)
        self.engine = VllmEngine(
            self.fleet, tiny_tokenizer(), end_token_ids=(), context=CONTEXT, vocabulary=model.config.vocab_size,
            connect=self.connect, **{"adapters": False, **keys},
        )  # fmt: skip

    def connect(self, url: str, token: str | None) -> httpx2.AsyncClient:
        return self.fakes[int(url[-1])].connect(url, token)

    def first(self) -> tuple[Any, Any]:
        """The fake that the prompt goes to first, and the other one."""
        known = self.fleet._choose(PROMPT, 0)
        assert known is not None
        index = int(known.url[-1])
        return self.fakes[index], self.fakes[1 - index]


@pytest.fixture
def pair(peaked: Callable[..., Any], fake_vllm: Any) -> Callable[..., Pair]:
    return lambda **keys: Pair(peaked("llama"), fake_vllm, **keys)


def aborted(content: dict[str, Any]) -> None:
    content["choices"][0]["finish_reason"] = "abort"


def cut(content: dict[str, Any]) -> None:
    content["choices"][0]["logprobs"]["content"].pop()


def short_span(content: dict[str, Any]) -> None:
    content["choices"][0]["weight_versions"][0]["end"] -= 1


def restarted(content: dict[str, Any]) -> None:
    content["choices"][0]["weight_versions"][0]["version"] = "default"


def older(content: dict[str, Any]) -> None:
    content["choices"][0]["weight_versions"][0]["version"] = "2"


@pytest.mark.parametrize("spoil", [aborted, cut, short_span, restarted, older])
async def test_an_answer_that_is_not_whole_comes_from_another_server(pair: Any, spoil: Any) -> None:
    both = pair()
    good = await both.engine.generate(PROMPT, 3, Sampling(6), [1, 2, 3])
    first, other = both.first()
    first.spoil = spoil
    asked = other.asked
    assert await both.engine.generate(PROMPT, 3, Sampling(6), [1, 2, 3]) == good
    assert other.asked > asked
    assert [server.ready for server in both.fleet.servers].count(False) == 1


async def test_a_server_that_refuses_or_dies_is_left_and_brought_back_once(pair: Any) -> None:
    both, lost = pair(), []
    both.fleet.on_failure = lost.append
    first, _ = both.first()
    first.status = 500
    completions = await both.engine.generate(PROMPT, 4, Sampling(6), range(4))
    assert [len(c.token_ids) for c in completions] == [6] * 4
    assert len(lost) == 1
    assert "status 500: the fake refuses" in lost[0].reason


async def test_a_frozen_server_is_found_by_its_tokens_and_all_frozen_ends_with_names(pair: Any) -> None:
    both = pair(stall_s=0.3)
    first, other = both.first()
    first.frozen = True
    completions = await both.engine.generate(PROMPT, 2, Sampling(6), [1, 2])
    assert len(completions) == 2
    other.frozen = True
    with pytest.raises(
        EngineError, match=r"no server is left .*server 0: it has work and made no token .*server 1"
    ) as error:
        await both.engine.generate(PROMPT, 2, Sampling(6), [1, 2])
    assert "a prompt of 4 tokens that begins with [5, 9, 4, 17]" in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), -9999.0, float("inf")])
async def test_log_probabilities_that_are_no_numbers_end_the_call(pair: Any, value: float) -> None:
    both = pair()

    def spoil(content: dict[str, Any]) -> None:
        content["choices"][0]["logprobs"]["content"][1]["logprob"] = value

    for fake in both.fakes:
        fake.spoil = spoil
    with pytest.raises(EngineError, match=r"version 3: the log-probability of token 1 of a completion is not finite"):
        await both.engine.generate(PROMPT, 1, Sampling(6), [1])


async def test_tokens_of_unconfirmed_weights_wait_for_the_verdict(pair: Any) -> None:
    both = pair()
    for fake in both.fakes:
        fake.version = "unverified-3"
    (completion,) = await both.engine.generate(PROMPT, 1, Sampling(6), [1])
    assert completion.versions == (VersionSpan(3, 0, 6),)
    for fake in both.fakes:
        fake.version = "unverified-4"
    with pytest.raises(EngineError, match="version 4, which were not confirmed"):
        await both.engine.generate(PROMPT, 1, Sampling(6), [1])


async def test_an_adapter_is_asked_for_by_its_version_and_must_answer_itself(pair: Any) -> None:
    both = pair(adapters=True)
    asked = []
    for fake in both.fakes:
        fake.spoil = lambda content: asked.append(content["model"])
    (completion,) = await both.engine.generate(PROMPT, 1, Sampling(6), [1])
    assert asked == ["policy-v3"]
    assert completion.versions == (VersionSpan(3, 0, 6),)
    for fake in both.fakes:
        fake.spoil = lambda content: content.update(model="base")
    with pytest.raises(EngineError, match="answered as 'base' where 'policy-v3' was asked"):
        await both.engine.generate(PROMPT, 1, Sampling(6), [1])


async def test_a_completion_that_went_past_its_stop_string_is_an_error(pair: Any) -> None:
    both = pair()
    (free,) = await both.engine.generate(PROMPT, 1, Sampling(8), [1])
    stop = tiny_tokenizer().decode(free.token_ids[2:4])
    longer = {"token_ids": list(free.token_ids), "finish_reason": "length"}

    def spoil(content: dict[str, Any]) -> None:
        choice = content["choices"][0]
        choice.update(longer)
        choice["logprobs"]["content"] = [
            {"token_id": t, "logprob": p} for t, p in zip(free.token_ids, free.logprobs, strict=True)
        ]
        choice["weight_versions"][0]["end"] = len(free.token_ids)

    for fake in both.fakes:
        fake.spoil = spoil
    with pytest.raises(EngineError, match="should have ended after"):
        await both.engine.generate(PROMPT, 1, Sampling(8, stop=(stop,)), [1])
