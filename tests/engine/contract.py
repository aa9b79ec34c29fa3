"""What every engine owes its callers, as tests: a test module subclasses `EngineContract` and gives it a `bench`.

class TestMyEngine(EngineContract):
    @pytest.fixture
    def bench(self): return Bench(model, tokenizer, make=lambda **keys: MyEngine(..., **keys))
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from miles.errors import EngineError
from miles.protocols import Engine
from miles.types import Completion, Sampling, VersionSpan

PROMPT = (5, 9, 4, 17, 6, 11, 8)
OTHER = (7, 7, 20, 5)


@dataclass(frozen=True)
class Bench:
    """An engine's maker, and what it serves: a transformers model of small vocabulary, not too flat, and a tokenizer.

    `make(end_token_ids=())` gives a fresh engine at version 3. `context`: tokens that prompt and completion may have.
    """

    model: Any
    tokenizer: Any
    make: Callable[..., Engine]
    context: int
    tolerance: float = 1e-4  # of log-probs against a plain forward
    deterministic: bool = True  # a call's bits are promised not to depend on other calls
    draws: int = 3000  # samples that a distribution is measured with


@torch.no_grad()
def plain_logits(model: Any, ids: Sequence[int]) -> Tensor:
    """[len(ids), V] of a plain forward without a cache."""
    return model(torch.tensor([list(ids)]), use_cache=False).logits[0].double()


def check_logprobs(bench: Bench, prompt: Sequence[int], completion: Completion, temperature: float) -> None:
    """The completion's log-probs are those of a plain forward over prompt and completion."""
    logits = plain_logits(bench.model, [*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    expected = (logits / (temperature or 1.0)).log_softmax(-1)
    expected = expected[range(len(completion.token_ids)), list(completion.token_ids)]
    assert len(completion.logprobs) == len(completion.token_ids)
    assert completion.logprobs == pytest.approx(expected.tolist(), abs=bench.tolerance)


class EngineContract:
    @pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
    async def test_logprobs_are_the_models_at_the_sampling_temperature(self, bench: Bench, temperature: float) -> None:
        completions = await bench.make().generate(PROMPT, 5, Sampling(12, temperature), range(5))
        for completion in completions:
            check_logprobs(bench, PROMPT, completion, temperature)

    async def test_greedy_takes_the_largest_logit_and_reports_it_at_temperature_one(self, bench: Bench) -> None:
        first, second = await bench.make().generate(PROMPT, 2, Sampling(10, temperature=0.0), [1, 2])
        assert first.token_ids == second.token_ids
        check_logprobs(bench, PROMPT, first, 1.0)
        best = plain_logits(bench.model, [*PROMPT, *first.token_ids])[len(PROMPT) - 1 : -1].argmax(-1)
        assert list(first.token_ids) == best.tolist()

    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    async def test_the_first_token_has_the_models_distribution(self, bench: Bench, temperature: float) -> None:
        n = bench.draws
        completions = await bench.make().generate(PROMPT, n, Sampling(1, temperature), range(n))
        counts = Counter(completion.token_ids[0] for completion in completions)
        p = (plain_logits(bench.model, PROMPT)[-1] / temperature).softmax(-1).tolist()
        for token, expected in enumerate(p):
            error = math.sqrt(expected * (1 - expected) / n)
            assert abs(counts[token] / n - expected) < 5 * error + 1e-4

    async def test_the_second_token_too(self, bench: Bench) -> None:
        n = bench.draws
        completions = await bench.make().generate(PROMPT, n, Sampling(2), range(n))
        first = Counter(completion.token_ids[0] for completion in completions).most_common(1)[0][0]
        after = [completion.token_ids[1] for completion in completions if completion.token_ids[0] == first]
        p = plain_logits(bench.model, [*PROMPT, first])[-1].softmax(-1).tolist()
        for token, expected in enumerate(p):
            error = math.sqrt(expected * (1 - expected) / len(after))
            assert abs(after.count(token) / len(after) - expected) < 5 * error + 1e-4

    async def test_a_seed_is_a_sample_wherever_it_stands(self, bench: Bench) -> None:
        engine = bench.make()
        seeds = [11, 2**63 - 1, 0, 11, 4]
        forward = await engine.generate(PROMPT, 5, Sampling(10), seeds)
        backward = await engine.generate(PROMPT, 5, Sampling(10), seeds[::-1])
        assert [c.token_ids for c in forward] == [c.token_ids for c in backward[::-1]]
        assert forward[0].token_ids == forward[3].token_ids
        assert forward[0].logprobs == pytest.approx(
            forward[3].logprobs, abs=0 if bench.deterministic else bench.tolerance
        )
        assert len({c.token_ids for c in forward}) == 4  # different seeds, different samples

    async def test_end_tokens_of_engine_and_call_end_a_completion_and_are_part_of_it(self, bench: Bench) -> None:
        ends = {4, 5, 6}
        engine = bench.make(end_token_ids=(4, 5))
        completions = await engine.generate(PROMPT, 40, Sampling(12, 2.0, stop_token_ids=(6,)), range(40))
        assert {c.token_ids[-1] for c in completions if c.stop_reason == "stop"} == ends
        for completion in completions:
            assert not ends & set(completion.token_ids[:-1])
            assert (completion.stop_reason == "stop") == (completion.token_ids[-1] in ends)
            assert len(completion.token_ids) == 12 or completion.stop_reason == "stop"
            check_logprobs(bench, PROMPT, completion, 2.0)

    async def test_the_limit_cuts_and_adds_nothing(self, bench: Bench) -> None:
        free = await bench.make().generate(PROMPT, 4, Sampling(9), range(4))
        cut = await bench.make().generate(PROMPT, 4, Sampling(4), range(4))
        assert {c.stop_reason for c in cut} == {"length"}
        assert [c.token_ids for c in cut] == [c.token_ids[:4] for c in free]

    async def test_an_end_token_at_the_limit_is_a_stop(self, bench: Bench) -> None:
        (free,) = await bench.make().generate(PROMPT, 1, Sampling(3), [5])
        last = free.token_ids[-1]
        sampling = Sampling(free.token_ids.index(last) + 1, stop_token_ids=(last,))
        (completion,) = await bench.make().generate(PROMPT, 1, sampling, [5])
        assert completion.stop_reason == "stop"

    async def test_a_stop_string_ends_with_the_token_that_completes_it(self, bench: Bench) -> None:
        (free,) = await bench.make().generate(PROMPT, 1, Sampling(14), [8])
        stop = bench.tokenizer.decode(free.token_ids[4:7])
        whole = bench.tokenizer.decode(free.token_ids)
        (completion,) = await bench.make().generate(PROMPT, 1, Sampling(14, stop=("never", stop)), [8])
        text = bench.tokenizer.decode(completion.token_ids)
        assert completion.stop_reason == "stop"
        assert text == whole[: whole.index(stop) + len(stop)]
        assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
        assert len(completion.logprobs) == len(completion.token_ids) == completion.versions[-1].end

    async def test_a_call_does_not_depend_on_what_else_is_under_way(self, bench: Bench) -> None:
        if not bench.deterministic:
            pytest.skip("this engine does not promise it")
        alone = await bench.make().generate(PROMPT, 6, Sampling(10), range(6))
        engine = bench.make()
        _, again, *_ = await asyncio.gather(
            engine.generate(OTHER, 3, Sampling(17, 0.7), range(3)),
            engine.generate(PROMPT, 6, Sampling(10), range(6)),
            engine.generate(PROMPT * 9, 2, Sampling(3), range(2)),
            engine.generate(PROMPT, 9, Sampling(5, 0.0), range(9)),
        )
        assert again == alone

    async def test_more_prompts_than_fit_one_forward(self, bench: Bench) -> None:
        engine = bench.make()
        prompts = [[5 + (place * (number + 3)) % 23 for place in range(220)] for number in range(40)]
        calls = (engine.generate(prompt, 1, Sampling(3), [number]) for number, prompt in enumerate(prompts))
        for prompt, (completion,) in zip(prompts, await asyncio.gather(*calls), strict=True):
            check_logprobs(bench, prompt, completion, 1.0)

    async def test_versions_cover_every_token(self, bench: Bench) -> None:
        for completion in await bench.make().generate(PROMPT, 2, Sampling(5), [1, 2], min_version=3):
            assert completion.versions == (VersionSpan(3, 0, 5),)

    async def test_older_weights_than_asked_for_are_refused(self, bench: Bench) -> None:
        with pytest.raises(EngineError, match=r"4 or newer .* are 3"):
            await bench.make().generate(PROMPT, 1, Sampling(1), [0], min_version=4)

    async def test_a_prompt_that_leaves_no_room_is_refused_and_its_neighbour_is_not(self, bench: Bench) -> None:
        engine = bench.make()
        fits = [5] * (bench.context - 16)
        results = await asyncio.gather(
            engine.generate([*fits, 5], 2, Sampling(16), [0, 1]),
            engine.generate(fits, 2, Sampling(16), [0, 1]),
            engine.generate([], 2, Sampling(16), [0, 1]),
            return_exceptions=True,
        )
        assert isinstance(results[0], EngineError)
        for number in (len(fits) + 1, 16, bench.context):
            assert str(number) in str(results[0])
        assert [len(c.token_ids) for c in results[1]] == [16, 16]
        assert isinstance(results[2], EngineError)
        assert "empty" in str(results[2])
