from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from miles.engine.inprocess import InProcessEngine
from miles.errors import EngineError
from miles.learn.tiny import CONTEXT, EOS_ID, FAMILIES, PAD_ID, WINDOW, tiny_tokenizer
from miles.types import Completion, Sampling

FAMILIES_AND_HEADS = [(family, tied) for family in FAMILIES for tied in (True, False)]
SHORT, LONG = (5, 9, 4), tuple(4 + i % 24 for i in range(WINDOW + 21))


def worst(model: Any, prompt: tuple[int, ...], completions: list[Completion], temperature: float = 1.0) -> float:
    """Largest difference between the completions' log-probs and those of a plain forward."""
    differences = []
    for completion in completions:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion.token_ids]]), use_cache=False).logits[0]
        logprobs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        taken = logprobs[range(len(completion.token_ids)), list(completion.token_ids)]
        differences.append((taken - torch.tensor(completion.logprobs)).abs().max().item())
    return max(differences)


@pytest.mark.parametrize(("family", "tied"), FAMILIES_AND_HEADS)
async def test_every_family_is_exact_inside_and_beyond_its_window(
    family: str, tied: bool, peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked(family, tied)
    engine = engine_of(model)
    short, long = await asyncio.gather(
        engine.generate(SHORT, 3, Sampling(WINDOW + 10), [1, 2, 3]), engine.generate(LONG, 2, Sampling(20, 0.8), [4, 5])
    )
    assert engine.slow_reason is None
    assert worst(model, SHORT, short) < 1e-4
    assert worst(model, LONG, long, 0.8) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
async def test_bits_do_not_depend_on_neighbours_order_or_batch_size(
    family: str, peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked(family)
    calls = [(LONG[:k], 3 + k % 5, Sampling(6 + 5 * (k % 4), 0.5 + k / 20)) for k in (3, 8, 20, 29, 20, 37)]

    async def run(order: list[int], **keys: Any) -> dict[int, list[Completion]]:
        engine = engine_of(model, end_token_ids=(7, 8), **keys)
        results = await asyncio.gather(
            *(engine.generate(*calls[i], [100 * i + j for j in range(calls[i][1])]) for i in order)
        )
        assert engine.slow_reason is None
        return dict(zip(order, results, strict=True))

    whole = await run([0, 1, 2, 3, 4, 5])
    assert await run([5, 2, 0, 4, 1, 3], max_batch=90) == whole
    assert await run([0, 1, 2, 3, 4, 5], max_batch=3) == whole
    for i in (1, 5):
        assert await run([i]) == {i: whole[i]}


async def test_a_call_that_comes_while_others_decode_joins_them_and_keeps_its_bits(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked()
    alone = await engine_of(model).generate(SHORT, 4, Sampling(12), range(4))
    engine = engine_of(model)
    first = asyncio.create_task(engine.generate(LONG, 3, Sampling(30), range(3)))
    for _ in range(8):
        await asyncio.sleep(0)
    late = await engine.generate(SHORT, 4, Sampling(12), range(4))
    assert not first.done()
    assert late == alone
    assert worst(model, LONG, await first) < 1e-4


async def test_samples_beyond_max_batch_wait_and_every_call_is_answered_in_order(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    engine = engine_of(peaked(), max_batch=4)
    finished: list[int] = []

    async def call(i: int) -> list[Completion]:
        completions = await engine.generate(LONG[: 5 + i], 3, Sampling(6), range(3))
        finished.append(i)
        return completions

    results = await asyncio.gather(*(call(i) for i in range(5)))
    assert [len(completions) for completions in results] == [3] * 5
    assert finished == [0, 1, 2, 3, 4]


async def test_the_weights_of_the_moment_are_sampled_from(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked()
    engine = engine_of(model)
    before = await engine.generate(SHORT, 3, Sampling(8), range(3))
    original = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    after = await engine.generate(SHORT, 3, Sampling(8), range(3))
    assert worst(model, SHORT, after) < 1e-4
    assert worst(original, SHORT, before) < 1e-4
    assert before != after


async def test_a_version_that_moves_under_a_call_fails_it(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    version = 3
    engine = engine_of(peaked(), version=lambda: version)
    call = asyncio.create_task(engine.generate(SHORT, 2, Sampling(50), [1, 2]))
    for _ in range(6):
        await asyncio.sleep(0)
    version = 4
    with pytest.raises(EngineError, match="from version 3 to 4"):
        await call
    (completion,) = await engine.generate(SHORT, 1, Sampling(2), [1])
    assert completion.versions[0].version == 4


async def test_nothing_of_the_model_is_changed(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked("gemma3", attention_dropout=0.5)
    reference = await engine_of(model).generate(SHORT, 2, Sampling(5), [1, 2])
    model.train()
    model.model.layers[0].eval()
    flags = {name: module.training for name, module in model.named_modules()}
    config = model.config.to_dict() | {"attention": model.config._attn_implementation}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    completions = await engine_of(model).generate(SHORT, 2, Sampling(5), [1, 2])
    assert completions == reference  # no dropout
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert model.config.to_dict() | {"attention": model.config._attn_implementation} == config
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad and not p.is_inference() for p in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(torch.tensor([SHORT]), labels=torch.tensor([SHORT])).loss.backward()  # it still trains


async def test_compiled_blocks_are_run_as_they_are_written(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked()
    reference = await engine_of(model).generate(SHORT, 2, Sampling(5), [1, 2])
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=backend)
    assert await engine_of(model).generate(SHORT, 2, Sampling(5), [1, 2]) == reference
    assert graphs == []


async def test_an_event_loop_gets_its_turn_between_two_tokens(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    turns = 0

    async def heartbeat() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(heartbeat())
    await engine_of(peaked()).generate(SHORT, 3, Sampling(20), range(3))
    task.cancel()
    assert turns >= 19


def test_one_engine_serves_one_event_loop_after_another(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    engine = engine_of(peaked())

    async def abandon() -> None:
        asyncio.create_task(engine.generate(SHORT, 3, Sampling(100), range(3)))  # noqa: RUF006
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    first = asyncio.run(engine.generate(SHORT, 2, Sampling(4), [1, 2]))
    asyncio.run(abandon())
    assert asyncio.run(engine.generate(SHORT, 2, Sampling(4), [1, 2])) == first


def test_calls_of_a_loop_that_was_never_finished_are_dropped(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    engine = engine_of(peaked())
    loop = asyncio.new_event_loop()
    task = loop.create_task(engine.generate(SHORT, 3, Sampling(100), range(3)))
    for _ in range(3):
        loop.run_until_complete(asyncio.sleep(0))
    completions = asyncio.run(engine.generate(SHORT, 1, Sampling(4), [1]))
    assert len(completions[0].token_ids) == 4
    for leftover in (task, *asyncio.all_tasks(loop)):
        leftover.cancel()
    loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
    loop.close()


async def test_a_cancelled_caller_frees_its_rows_and_harms_nobody(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked()
    alone = await engine_of(model).generate(LONG, 2, Sampling(20), [1, 2])
    engine = engine_of(model, max_batch=4)
    doomed = asyncio.create_task(engine.generate(SHORT, 4, Sampling(400), range(4)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(engine.generate(LONG, 2, Sampling(20), [1, 2]))
    for _ in range(10):
        await asyncio.sleep(0)
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert await asyncio.wait_for(waiting, 20) == alone


async def test_an_error_of_one_call_is_that_calls(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    class Broken:
        def decode(self, ids: Any, **keys: Any) -> str:
            raise ValueError("no such token")

    model = peaked()
    engine = InProcessEngine(model, Broken(), version=lambda: 0, end_token_ids=())
    failed, whole = await asyncio.gather(
        engine.generate(SHORT, 2, Sampling(5, stop=("x",)), [1, 2]),
        engine.generate(SHORT, 2, Sampling(5), [1, 2]),
        return_exceptions=True,
    )
    assert isinstance(failed, EngineError)
    assert "ValueError: no such token" in str(failed)
    assert worst(model, SHORT, whole) < 1e-4


@pytest.mark.parametrize("warm", [False, True])
async def test_weights_with_nan_raise_and_never_sample(
    warm: bool, peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked()
    engine = engine_of(model)
    reference = await engine_of(model).generate(SHORT, 2, Sampling(5), [1, 2])
    if warm:
        await engine.generate(SHORT, 1, Sampling(1), [0])
    good = model.lm_head.weight[5, 3].item()
    with torch.no_grad():
        model.lm_head.weight[5, 3] = float("nan")
    results = await asyncio.gather(
        *(engine.generate(ids, 2, Sampling(5), [1, 2]) for ids in (SHORT, LONG)), return_exceptions=True
    )
    for result in results:
        assert isinstance(result, EngineError)
        assert "not finite" in str(result)
        assert "NaN" in str(result)
    with torch.no_grad():
        model.lm_head.weight[5, 3] = good
    assert await engine.generate(SHORT, 2, Sampling(5), [1, 2]) == reference


async def test_nan_of_one_call_does_not_reach_the_next_owner_of_its_slots(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model, poison = peaked(), 6
    with torch.no_grad():
        model.lm_head.weight[poison] = 0  # untied; its logit is 0 and the largest others are far above
    engine = engine_of(model, max_batch=3)
    calls = [
        ((5,) * 30, 1, Sampling(20, 0.0), [0]),
        ((7, poison) * 9, 2, Sampling(9), [0, 1]),
        ((5, 9), 2, Sampling(4, 0.0), [0, 1]),
    ]
    expected = [await engine.generate(*call) for call in calls]
    assert poison not in {token for i in (0, 2) for c in expected[i] for token in c.token_ids}
    with torch.no_grad():
        model.model.embed_tokens.weight[poison] = float("nan")
    long, bad, after = await asyncio.gather(*(engine.generate(*call) for call in calls), return_exceptions=True)
    assert isinstance(bad, EngineError)
    assert [long, after] == [expected[0], expected[2]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [5, 28]}, r"token id 28; the model's ids run from 0 to \d+"),
        ({"seeds": [1]}, "n = 2 and 1 seeds"),
        ({"seeds": [1, -1]}, r"seed must lie in \[0, 2\*\*64\), got -1"),
        ({"sampling": Sampling(0)}, "max_new_tokens must be >= 1, got 0"),
        ({"sampling": Sampling(2, -0.5)}, "temperature must be a finite number >= 0, got -0.5"),
        ({"sampling": Sampling(2, stop=("",))}, "stop string must not be empty"),
    ],
)
async def test_a_call_that_makes_no_sense_names_the_value(
    change: dict[str, Any], message: str, peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked(vocab_size=28)
    call = {"ids": [5, 9], "n": 2, "sampling": Sampling(2), "seeds": [1, 2]} | change
    with pytest.raises(EngineError, match=message):
        await engine_of(model).generate(**call)


def test_a_batch_of_none_is_refused(engine_of: Callable[..., InProcessEngine]) -> None:
    with pytest.raises(EngineError, match=r"engine\.max_batch must be >= 1, got 0"):
        engine_of(None, max_batch=0)


async def test_model_limit_64_with_prompts_of_10_70_and_64(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    engine = engine_of(peaked(max_position_embeddings=64))
    results = await asyncio.gather(
        *(engine.generate([5] * length, 2, Sampling(16), [0, 1]) for length in (10, 70, 64)), return_exceptions=True
    )
    assert [len(c.token_ids) for c in results[0]] == [16, 16]
    for length, error in zip((70, 64), results[1:], strict=True):
        assert isinstance(error, EngineError)
        assert f"a prompt of {length} tokens and 16 new tokens do not fit the model's context of 64" in str(error)
        assert "48" in str(error)


async def test_a_limit_of_four_keeps_four_tokens_and_forces_no_end(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    engine = engine_of(peaked(), end_token_ids=(EOS_ID, PAD_ID))
    completions = await engine.generate(SHORT, 64, Sampling(4, 3.0), range(64))
    cut = [c for c in completions if c.stop_reason == "length"]
    assert cut
    for completion in cut:
        assert len(completion.token_ids) == 4
        assert not {EOS_ID, PAD_ID} & set(completion.token_ids)
    for completion in completions:  # of several end tokens exactly one ends it: nothing is left to trim but the last
        assert sum(token in (EOS_ID, PAD_ID) for token in completion.token_ids[:-1]) == 0


async def test_going_on_from_an_aborted_answer_draws_no_more_than_the_rest(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked()
    engine = engine_of(model)
    (first,) = await engine.generate(SHORT, 1, Sampling(6), [9])
    (rest,) = await engine.generate((*SHORT, *first.token_ids), 1, Sampling(10 - 6), [10])
    assert (len(first.token_ids), len(rest.token_ids), rest.stop_reason) == (6, 4, "length")
    assert worst(model, (*SHORT, *first.token_ids), [rest]) < 1e-4


async def test_a_retry_keeps_nothing_of_the_try_before(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    engine = engine_of(peaked())
    aborted = asyncio.create_task(engine.generate(SHORT, 1, Sampling(7), [3]))
    for _ in range(6):
        await asyncio.sleep(0)
    aborted.cancel()
    (completion,) = await engine.generate(SHORT, 1, Sampling(7), [3])
    assert len(completion.token_ids) == len(completion.logprobs) == completion.versions[0].end == 7


async def test_a_tag_as_stop_string_leaves_ids_logprobs_and_text_in_step(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model, tokenizer = peaked(), tiny_tokenizer()
    bias = torch.zeros(model.config.vocab_size)
    bias[tokenizer.convert_tokens_to_ids(list("low"))] = 6.0  # makes "low" likely
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(bias)
    completions = await engine_of(model).generate(SHORT, 30, Sampling(60, 1.5, stop=("low",)), range(30))
    stopped = [c for c in completions if c.stop_reason == "stop"]
    assert stopped
    for completion in stopped:
        text = tokenizer.decode(completion.token_ids)
        assert text.endswith("low")
        assert text.count("low") == 1
        assert len(completion.token_ids) == len(completion.logprobs) == completion.versions[0].end


async def test_longer_answers_than_the_context_has_room_for_are_the_limit(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked("mistral", num_hidden_layers=1)
    prompt = tuple(LONG * 5)[:150]
    (completion,) = await engine_of(model).generate(prompt, 1, Sampling(CONTEXT - 150), [3])
    assert len(completion.token_ids) == CONTEXT - 150
    assert worst(model, prompt, [completion]) < 1e-4
