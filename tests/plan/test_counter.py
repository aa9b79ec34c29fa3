"""What the counter of live bytes sees: real tensors, fake tensors, shards, and storages that change their size."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from miles.plan.counter import ACTIVATIONS, GATHERED, LOGITS, LiveBytes
from miles.plan.fake import fake_numbers, fake_ranks


def mlp(width: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False))


def test_tensors_count_while_they_live_and_views_count_once() -> None:
    with LiveBytes() as counter:
        a = torch.zeros(10, 10)
        b = a[2:].view(-1)
        assert counter.now == {ACTIVATIONS: 400}
        c = a + 1
        assert counter.now == {ACTIVATIONS: 800}
        del a, c
        assert counter.now == {ACTIVATIONS: 400}
        assert b.sum() == 0
    assert counter.peaks[""][ACTIVATIONS] >= 800


def test_a_phase_keeps_its_fullest_moment() -> None:
    with LiveBytes() as counter:
        held = torch.zeros(100)
        counter.begin("one")
        torch.zeros(1000)
        counter.begin("two")
        torch.zeros(10)
        counter.begin("one")
        torch.zeros(500)
    assert {phase: kinds[ACTIVATIONS] for phase, kinds in counter.peaks.items() if phase} == {"one": 4400, "two": 440}
    assert len(held) == 100


def test_kinds_come_from_shapes_and_labels() -> None:
    with LiveBytes(vocabulary=7) as counter:
        logits, weight = torch.zeros(3, 7), torch.zeros(5)
        counter.label([weight, None], "parameters/actor")
    assert +counter.now == {LOGITS: 84, "parameters/actor": 20}
    assert len(logits) == 3


def test_a_storage_that_is_resized_is_counted_at_its_size() -> None:
    with LiveBytes() as counter:
        tensor = torch.zeros(100)
        tensor.untyped_storage().resize_(0)
        assert not +counter.now
        tensor.untyped_storage().resize_(200)
        assert +counter.now == {GATHERED: 200}
    tensor.untyped_storage().resize_(400)  # outside nothing is watched any more
    assert +counter.now == {GATHERED: 200}


def peaks_of_a_step(model: nn.Module) -> dict[str, int]:
    """Bytes at the fullest moment of each phase of a second step."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with LiveBytes() as counter:
        counter.label(model.parameters(), "parameters")
        for _ in range(2):
            counter.forget_peaks()
            counter.begin("forward")
            loss = model(torch.ones(8, 64)).square().mean()
            counter.begin("backward")
            loss.backward()
            counter.begin("optimizer")
            optimizer.step()
            optimizer.zero_grad()
            del loss
    return {phase: sum(kinds.values()) for phase, kinds in counter.peaks.items()}


def test_fake_numbers_hold_what_real_ones_would() -> None:
    real = peaks_of_a_step(mlp())
    with fake_numbers():
        fake = peaks_of_a_step(mlp())
    assert fake == real
    assert real["optimizer"] >= 4 * 4 * 2 * 64 * 256  # weights, gradients, two moments


def test_on_fake_ranks_this_rank_holds_its_part() -> None:
    with fake_ranks(4), fake_numbers():
        model = mlp()
        mesh = dist.init_device_mesh("cpu", (4,))
        fully_shard(model, mesh=mesh)
        with LiveBytes() as counter:
            counter.label(model.parameters(), "parameters")
            whole = 4 * 2 * 64 * 256
            assert +counter.now == {"parameters": whole // 4}
            counter.begin("forward")
            loss = model(torch.ones(8, 64)).square().mean()
            counter.begin("backward")
            loss.backward()
            assert counter.now["parameters"] == whole // 4
        # Gathered weights once as they come from the ranks and once as parameters; no tensor of global shape beside them.
        assert counter.peaks["forward"][GATHERED] == 2 * whole
        assert max(sum(kinds.values()) for kinds in counter.peaks.values()) < 4 * whole
