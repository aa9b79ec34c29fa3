from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BloomConfig, Gemma2Config, GPT2Config, MambaConfig, Qwen3NextConfig

from miles.engine.inprocess import InProcessEngine
from miles.engine.probe import probe
from miles.errors import EngineError
from miles.learn.tiny import FAMILIES
from miles.types import Sampling

SMALL = {"vocab_size": 28, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
BLOOM = BloomConfig(**{**SMALL, "n_layer": 2, "n_head": 4})
GEMMA2 = Gemma2Config(
    **SMALL, intermediate_size=128, num_key_value_heads=2, head_dim=16, attn_logit_softcapping=0.05, sliding_window=16
)
QWEN3_NEXT = Qwen3NextConfig(
    **SMALL,
    intermediate_size=128,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=["linear_attention", "full_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=0,
)


def random_model(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        kind = "eager" if isinstance(config, Gemma2Config) else None  # other kinds leave its soft caps out
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=kind).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 2:
                    parameter.mul_(4)
    return model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (BLOOM, "does not go through transformers' attention interface"),
        (GEMMA2, "differs from plain causal attention"),
        (QWEN3_NEXT, "layers of kind linear_attention"),
    ],
    ids=["bloom", "gemma2", "qwen3_next"],
)
async def test_a_family_of_another_kind_is_refused_and_served_exactly_through_its_own_cache(
    config: Any, reason: str, engine_of: Callable[..., InProcessEngine]
) -> None:
    model = random_model(config)
    engine = engine_of(model, end_token_ids=(7,))
    calls = [((5, 9, 4, 8), 3, Sampling(9), [1, 2, 3]), ((6,) * 20, 18, Sampling(5, 0.7), range(18))]
    together = await asyncio.gather(*(engine.generate(*call) for call in calls))
    assert reason in str(engine.slow_reason)
    for (ids, _, sampling, _), completions in zip(calls, together, strict=True):
        for completion in completions:
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, *completion.token_ids]]), use_cache=False).logits[0]
            logprobs = (logits[len(ids) - 1 : -1] / sampling.temperature).log_softmax(-1)
            expected = logprobs[range(len(completion.token_ids)), list(completion.token_ids)]
            assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    for call, completions in zip(calls, together, strict=True):
        assert await engine_of(model, end_token_ids=(7,)).generate(*call) == completions


async def test_a_slow_call_that_fails_or_is_cancelled_leaves_the_others_alone(
    engine_of: Callable[..., InProcessEngine],
) -> None:
    model = random_model(BLOOM)
    engine = engine_of(model)
    good = await engine.generate((5, 9), 2, Sampling(6), [1, 2])
    doomed = asyncio.create_task(engine.generate((5, 9), 2, Sampling(400), [1, 2]))
    waiting = asyncio.create_task(engine.generate((5, 9), 2, Sampling(6), [1, 2]))
    for _ in range(5):
        await asyncio.sleep(0)
    doomed.cancel()
    assert await asyncio.wait_for(waiting, 20) == good
    with torch.no_grad():
        model.transformer.word_embeddings.weight[11] = float("nan")
    bad = asyncio.create_task(engine.generate((11,), 1, Sampling(3), [0]))
    with pytest.raises(EngineError, match="not finite at token 0"):
        await bad


async def test_a_family_without_a_key_value_cache_is_refused(engine_of: Callable[..., InProcessEngine]) -> None:
    model = random_model(MambaConfig(vocab_size=28, hidden_size=32, num_hidden_layers=1, state_size=4))
    with pytest.raises(EngineError, match="MambaForCausalLM gives back no key-value cache"):
        await engine_of(model).generate((5, 9), 2, Sampling(3), [1, 2])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("deterministic", [True, False])
def test_the_families_we_train_take_the_fast_path(family: str, deterministic: bool, peaked: Callable[..., Any]) -> None:
    findings = probe(peaked(family), deterministic)
    assert findings.refusal is None
    assert (findings.tiles is not None) == deterministic


class Leaning(nn.Linear):
    """A layer whose rows feel how many there are, as a library's may."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1e-6 * (x.numel() // x.shape[-1]))


async def test_products_that_lean_on_their_neighbours_are_found_and_calls_then_run_alone(
    peaked: Callable[..., Any], engine_of: Callable[..., InProcessEngine]
) -> None:
    model = peaked()
    model.model.layers[0].mlp.up_proj.__class__ = Leaning
    engine = engine_of(model)
    alone = await engine.generate((5, 9), 3, Sampling(6), range(3))
    assert "change a row's bits with its neighbours" in str(engine.slow_reason)
    together = await asyncio.gather(*(engine.generate((5, 9), n, Sampling(6), range(n)) for n in (3, 5)))
    assert together[0] == alone
    free = engine_of(model, deterministic=False)
    await free.generate((5, 9), 3, Sampling(6), range(3))
    assert free.slow_reason is None


def test_a_window_that_attention_is_not_told_of_is_refused(peaked: Callable[..., Any]) -> None:
    model = peaked("mistral")
    model.config.sliding_window = None  # what the layers pass on
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert "does not tell its attention function the sliding window" in str(probe(model, False).refusal)


def test_a_layer_that_someone_wrapped_keeps_its_forward(peaked: Callable[..., Any]) -> None:
    model = peaked()
    layer = model.model.layers[1].mlp.down_proj
    plain = layer.forward
    layer.forward = lambda x: plain(x)
    findings = probe(model, True)
    assert "forward" in layer.__dict__
    assert findings.refusal is None


def test_learned_positions_work_too() -> None:
    assert probe(random_model(GPT2Config(vocab_size=28, n_embd=64, n_layer=2, n_head=4)), False).refusal is None
