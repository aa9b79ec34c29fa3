from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from miles.publish.vllm_adapters import by_adapter, expand, install, shrink


def each_row(x: torch.Tensor, stacked: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    rows = [
        stacked[slot, 0] @ row if slot >= 0 else torch.zeros(stacked.shape[2])
        for row, slot in zip(x, slots, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("slots", [[1, 1, 1, 1], [0, 2, 0, -1], [-1, -1, -1, -1]])
def test_products_are_those_of_each_row_with_its_own_adapter(slots: list[int]) -> None:
    generator = torch.Generator().manual_seed(0)
    x, stacked = torch.randn(4, 6, generator=generator), torch.randn(3, 1, 5, 6, generator=generator)
    index = torch.tensor(slots)
    expected = each_row(x, stacked, index)
    assert torch.allclose(by_adapter(x, stacked, index), expected, atol=1e-6)
    wrapper = SimpleNamespace(no_lora=False, token_lora_indices=index)
    y = torch.ones(4, 8)
    shrink(wrapper, y, x, stacked, 0.5)
    assert torch.allclose(y[:, :5], 0.5 * expected, atol=1e-6)
    assert bool((y[:, 5:] == 1).all())
    y = torch.ones(4, 8)
    expand(wrapper, y, x, stacked, 2, 5, True)
    assert torch.allclose(y[:, 2:7], 1 + expected, atol=1e-6)
    assert bool((y[:, [0, 1, 7]] == 1).all())


def test_a_batch_without_adapters_is_left_alone() -> None:
    class Wrapper:
        no_lora = True

    install(Wrapper)
    y = torch.ones(2, 3)
    Wrapper()._shrink_prefill(y, torch.ones(2, 4), torch.ones(1, 1, 3, 4), 1.0)
    Wrapper()._expand_slice_decode(y, torch.ones(2, 4), torch.ones(1, 1, 3, 4), 0, 3, True)
    assert bool((y == 1).all())
