from __future__ import annotations

import pytest
import torch

from miles.learn.gauges import VisibleFraction, peak_bytes


def on_grid(*shapes):
    return [torch.nn.Parameter(torch.randn(*shape).bfloat16().float()) for shape in shapes]


def test_weights_on_the_grid_that_move_by_little_are_not_seen_to_move():
    torch.manual_seed(0)
    weights = on_grid((300, 20), (50,))
    gauge = VisibleFraction(weights)
    assert gauge() is None, "nothing has moved"
    with torch.no_grad():
        for weight in weights:
            weight.mul_(1 + 1e-4)  # half a step of bf16 is 2e-3 of the weight
    assert gauge() == 0.0


def test_large_moves_are_seen_whole():
    torch.manual_seed(0)
    weights = on_grid((300, 20))
    gauge = VisibleFraction(weights)
    with torch.no_grad():
        weights[0].add_(torch.randn(300, 20))
    assert gauge() == pytest.approx(1.0, abs=0.01)


def test_a_small_model_is_measured_on_every_kind_of_weight_and_a_large_one_on_a_draw():
    weights = on_grid((100, 100), (3,))
    assert len(VisibleFraction(weights, coordinates=1000).start) == 1001
    assert len(VisibleFraction(weights).start) == 10003
    assert torch.equal(VisibleFraction(weights).start, VisibleFraction(weights).start)


def test_the_process_holds_more_than_a_large_tensor():
    held = torch.ones(30_000_000)
    assert peak_bytes(torch.device("cpu")) > held.numel() * 4
