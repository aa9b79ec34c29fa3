"""A sharded model that is gathered for a while samples what the whole model samples, and trains on as before."""

from __future__ import annotations

import asyncio

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from miles.engine.inprocess import InProcessEngine
from miles.learn.gathered import gathered
from miles.learn.tiny import tiny_model, tiny_tokenizer
from miles.types import Completion, Sampling


def sample(model, calls: int) -> list[Completion]:
    engine = InProcessEngine(model, tiny_tokenizer(), version=lambda: 0, end_token_ids=())
    found: list[Completion] = []
    for call in range(calls):
        found += asyncio.run(engine.generate([5, 6, 7], 2, Sampling(6), [call, call + 100]))
    return found


def sharded(seed: int):
    model = tiny_model("llama", True, seed=seed)
    for block in model.model.layers:
        fully_shard(block)
    return fully_shard(model)


def loss_of(model) -> Tensor:
    return model(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False).logits.float().logsumexp(-1).sum()


def job_sample() -> list[bool]:
    """Each rank makes another number of calls; first before any forward of the sharded model, then after a step of it."""
    plain, model = tiny_model("llama", True, seed=3), sharded(3)
    same = []
    for _ in range(2):
        with gathered(model):
            assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
            same.append(sample(model, 1 + dist.get_rank()) == sample(plain, 1 + dist.get_rank()))
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        for each in (plain, model):
            loss_of(each).backward()
            torch.optim.SGD(each.parameters(), lr=1e-3).step()
            each.zero_grad()
    weights = zip(plain.parameters(), model.parameters(), strict=True)
    same.append(all(torch.allclose(a, b.full_tensor(), atol=1e-6) for a, b in weights))
    return same


@pytest.mark.slow
def test_ranks_sample_with_whole_parameters_as_often_as_they_like(gang):
    assert gang.run(2, job_sample) == [[True, True, True]] * 2


def test_without_shards_nothing_happens():
    model = tiny_model("llama", True, seed=3)
    before = dict(model.named_parameters())
    with gathered(model):
        assert all(before[name] is parameter for name, parameter in model.named_parameters())
