"""Messages between the ranks of a run: bytes over a CPU group of their own, never pickled objects."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PATIENCE = datetime.timedelta(days=30)
"""Ranks wait for each other's rollouts and evaluations, however long; that a rank is alive is its launcher's business."""


class Channel:
    """What rank 0 tells the others, and what they hand in. A channel is used by one thread; two threads take two channels.

    Every call is collective: all ranks make the same calls in the same order.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        """`group`: a gloo group over all ranks. None: this process is alone."""
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @classmethod
    def open(cls) -> Channel:
        """A channel between all ranks of the default process group; where there is none, for this process alone."""
        if not dist.is_initialized():
            return cls()
        return cls(dist.new_group(backend="gloo", timeout=PATIENCE))

    def broadcast(self, payload: bytes | None = None) -> bytes:
        """Rank 0's payload, on every rank; what the others give is not looked at."""
        data = _tensor(payload if payload is not None and self.rank == 0 else b"")
        if self.size == 1:
            return data.numpy().tobytes()
        length = torch.tensor([data.numel()])
        dist.broadcast(length, 0, group=self._group)
        if self.rank:
            data = torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.broadcast(data, 0, group=self._group)
        return data.numpy().tobytes()

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's payload in the order of ranks, on rank 0; on the others nothing."""
        if self.rank == 0:
            return [payload, *(self._receive(rank) for rank in range(1, self.size))]
        dist.send(torch.tensor([len(payload)]), 0, group=self._group)
        if payload:
            dist.send(_tensor(payload), 0, group=self._group)
        return []

    def _receive(self, rank: int) -> bytes:
        length = torch.tensor([0])
        dist.recv(length, rank, group=self._group)
        data = torch.empty(int(length), dtype=torch.uint8)
        if int(length):
            dist.recv(data, rank, group=self._group)
        return data.numpy().tobytes()


def _tensor(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else torch.empty(0, dtype=torch.uint8)
