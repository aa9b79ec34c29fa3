"""Numbers are fake, indices are real."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from miles.plan.fake import SMALL, fake_numbers, fake_ranks


def test_numbers_are_fake_and_read_as_one() -> None:
    with fake_numbers():
        tensor = torch.zeros(1000, 1000)
        assert isinstance(tensor, FakeTensor)
        assert tensor.sum().item() == 1.0
        assert bool(torch.isfinite(tensor).all())


def test_indices_are_real_even_where_a_shape_depends_on_them() -> None:
    with fake_numbers():
        mask = torch.tensor([True, False, True])
        places = mask.nonzero().squeeze(1)
        assert places.tolist() == [0, 2]
        values, inverse = torch.tensor([5, 3, 5]).unique(return_inverse=True)
        assert (values.tolist(), inverse.tolist()) == ([3, 5], [1, 0, 1])
        assert torch.zeros(9)[places].shape == (2,)


def test_large_tables_of_indices_are_fake_too() -> None:
    with fake_numbers():
        side = torch.arange(SMALL // 512)
        table = side[:, None] <= side[None]
        assert isinstance(table, FakeTensor)
        assert table.shape == (len(side), len(side))
        assert not isinstance(torch.ones(8, dtype=torch.bool), FakeTensor)
        assert isinstance(torch.ones(SMALL + 1, dtype=torch.bool), FakeTensor)


def test_fake_ranks_leave_nothing_behind() -> None:
    with fake_ranks(64):
        assert (dist.get_rank(), dist.get_world_size()) == (0, 64)
    assert not dist.is_initialized()
