"""What ranks of one learner do together. Every rank runs the same code on the same step and makes the same calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from miles.learn.channel import PATIENCE, Channel
from miles.learn.parallel import make_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from miles.config.schema import Parallel


class Ranks:
    """The ranks of a learner; `Ranks()` is this process alone."""

    def __init__(self, mesh: DeviceMesh | None = None) -> None:
        """mesh: of all ranks of the default process group."""
        self.mesh = mesh
        self._group = None if mesh is None else dist.new_group(backend="gloo", timeout=PATIENCE)
        self._channel = Channel(self._group)
        self.rank, self.size = self._channel.rank, self._channel.size

    @classmethod
    def join(cls, parallel: Parallel, device: torch.device) -> Ranks:
        """All ranks of the default process group, or this process alone where there is none. Raises ConfigError."""
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        return cls(make_mesh(parallel, ranks, device.type))

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(tensor)
        return tensor

    def total(self, value: float) -> float:
        """The sum over ranks, the same bits on each."""
        return sum(self.gather(value))

    def most(self, value: int) -> int:
        """The largest over ranks."""
        return max(self.gather(value))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, JSON, in the order of ranks, on each of them."""
        if self.size == 1:
            return [value]
        parts = self._channel.gather(json.dumps(value).encode())
        return json.loads(self._channel.broadcast(b"[" + b",".join(parts) + b"]"))

    def join_columns(self, column: Tensor) -> Tensor:
        """[n of each rank] -> [sum of n], in the order of ranks, on the CPU of each of them."""
        sizes, column = self.gather(len(column)), column.cpu()
        if self.size == 1:
            return column
        padded = column.new_zeros(max(sizes))
        padded[: len(column)] = column
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=self._group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])
