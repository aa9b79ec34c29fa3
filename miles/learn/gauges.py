"""Two gauges of a learner: the memory it took, and how much of its movement a bf16 forward can see."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from miles.learn.shards import part_of

COORDINATES = 65536


def peak_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class VisibleFraction:
    """<round(w) - round(w0), w - w0> / |w - w0|^2 with w0 the weights at the start and round to bf16.

    1: rounding hides nothing on average; near 0: the forward still sees the starting weights. Taken on a fixed draw of
    coordinates, so no second copy of the weights is kept.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        over_ranks: Callable[[Tensor], Tensor] = lambda held: held,
        seed: int = 0,
        coordinates: int = COORDINATES,
    ) -> None:
        """over_ranks: the sum over ranks, of sharded parameters; each rank reads the coordinates that it holds."""
        self._parameters, self._over_ranks = list(parameters), over_ranks
        sizes = torch.tensor([parameter.numel() for parameter in self._parameters], dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        counts = (sizes / sizes.sum() * coordinates).ceil().clamp(max=sizes).long().tolist()
        self._places = [
            torch.randint(parameter.numel(), (count,), generator=generator).to(parameter.device)
            for parameter, count in zip(self._parameters, counts, strict=True)
        ]
        self.start = self._read()  # [coordinates] float32

    def __call__(self) -> float | None:
        """None while no coordinate has moved."""
        now = self._read()
        moved = (now - self.start).double()
        seen = (now.bfloat16().double() - self.start.bfloat16().double()) @ moved
        size = moved @ moved
        return (seen / size).item() if size > 0 else None

    def _read(self) -> Tensor:
        pairs = zip(self._parameters, self._places, strict=True)
        return self._over_ranks(torch.cat([_held(parameter.detach(), places) for parameter, places in pairs]))


def _held(parameter: Tensor, places: Tensor) -> Tensor:
    """[n] float32, the entries at these places of the flat tensor; of a sharded one 0 where another rank has to say it."""
    if not isinstance(parameter, DTensor):
        return parameter.reshape(-1)[places].float()
    part = part_of(parameter, 0, copy=False)
    if part.tensor is None:
        return torch.zeros(len(places), device=places.device)
    flat = part.tensor.reshape(-1).to(places.device)
    local = places - part.offsets[0] * math.prod(parameter.shape[1:])
    inside = (local >= 0) & (local < len(flat))
    return torch.where(inside, flat[local.clamp(0, len(flat) - 1)].float(), 0.0)
