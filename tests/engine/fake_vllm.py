"""A vLLM server in the test's own process: the routes that Miles uses, over the in-process engine; it can be made to fail."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx2

from miles.engine.inprocess import InProcessEngine
from miles.engine.vllm_routes import GENERATE
from miles.types import Completion, Sampling


class FakeVllm:
    """Serves `model` at `version`. `spoil` may change the content of an answer; `status` is answered with where not 200."""

    def __init__(self, model: Any, tokenizer: Any, version: str = "3") -> None:
        self.version, self.adapters = version, []
        self.spoil: Callable[[dict[str, Any]], object] = lambda content: None
        self.status, self.frozen, self.asked = 200, False, 0
        self._tokens = 0
        self._engine = InProcessEngine(model, tokenizer, version=lambda: 0, end_token_ids=())

    def connect(self, url: str, token: str | None) -> httpx2.AsyncClient:
        """In place of `vllm_routes.async_client`."""
        return httpx2.AsyncClient(transport=httpx2.MockTransport(self.answer), base_url="http://fake")

    async def answer(self, request: httpx2.Request) -> httpx2.Response:
        if self.frozen:
            await asyncio.sleep(3600)
        if request.url.path == "/metrics":
            page = f'vllm:generation_tokens_total{{a="b"}} {self._tokens}\nvllm:num_requests_waiting{{a="b"}} 0.0\n'
            return httpx2.Response(200, text=page)
        assert request.url.path == GENERATE
        self.asked += 1
        if self.status != 200:
            return httpx2.Response(self.status, json={"error": {"message": "the fake refuses"}})
        body = json.loads(request.content)
        content = self._content(body, await self._sample(body))
        self.spoil(content)
        return httpx2.Response(200, text=json.dumps(content))  # NaN too, as it is

    async def _sample(self, body: dict[str, Any]) -> Completion:
        params = body["sampling_params"]
        assert params["n"] == 1
        assert params["ignore_eos"]
        assert (params["top_p"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
        ends, stop = tuple(params["stop_token_ids"]), tuple(params.get("stop", ()))
        assert params.get("include_stop_str_in_output", False) == bool(stop)
        sampling = Sampling(params["max_tokens"], params["temperature"], ends, stop)
        (completion,) = await self._engine.generate(body["token_ids"], 1, sampling, [params["seed"]])
        self._tokens += len(completion.token_ids)
        return completion

    def _content(self, body: dict[str, Any], completion: Completion) -> dict[str, Any]:
        length = len(completion.token_ids)
        entries = [
            {"token_id": t, "logprob": p} for t, p in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        choice = {
            "index": 0, "finish_reason": completion.stop_reason, "token_ids": list(completion.token_ids),
            "logprobs": {"content": entries}, "weight_versions": [{"version": self.version, "start": 0, "end": length}],
        }  # fmt: skip
        return {"model": body.get("model", "base"), "choices": [choice]}
