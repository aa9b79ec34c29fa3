"""Two gauges of a learner: the memory it took, and how much of its movement a bf16 forward can see."""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

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

    def __init__(self, parameters: Sequence[Tensor], seed: int = 0, coordinates: int = COORDINATES) -> None:
        self._parameters = list(parameters)
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
        return torch.cat([parameter.detach().reshape(-1)[places].float() for parameter, places in pairs])
