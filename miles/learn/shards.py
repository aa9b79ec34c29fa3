"""Which part of a tensor a rank holds, and how the parts that all ranks have written become a tensor again on any ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

Place = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """What one rank stores of a tensor of `dtype` and `shape`: the box `tensor` that begins at `offsets`, or nothing.

    The parts of all ranks fill the tensor without overlap.
    """

    dtype: torch.dtype
    shape: torch.Size
    offsets: Place = ()
    tensor: Tensor | None = None

    def entry(self, file: str) -> dict[str, Any]:
        """What the index says of it; JSON."""
        pieces = []
        if self.tensor is not None:
            pieces = [{"file": file, "offsets": [*self.offsets], "shape": [*self.tensor.shape]}]
        return {"dtype": str(self.dtype).removeprefix("torch."), "shape": [*self.shape], "pieces": pieces}


def part_of(tensor: Tensor, rank: int, *, copy: bool) -> Part:
    """What this rank stores of a tensor; with `copy` from host memory of its own.

    Of a plain tensor, equal on all ranks, rank 0 stores all. Of the copies of a shard the first in the mesh is stored.
    """
    offsets, local = _held(tensor, rank)
    if local is not None:
        local = local.to("cpu", copy=True) if copy else local
        local = local.contiguous()
    return Part(tensor.dtype, tensor.shape, offsets, local)


def _held(tensor: Tensor, rank: int) -> tuple[Place, Tensor | None]:
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.dim(), tensor.detach() if rank == 0 else None
    coordinate = tensor.device_mesh.get_coordinate()
    places = zip(coordinate or (), tensor.placements, strict=coordinate is not None)
    if coordinate is None or any(place and not isinstance(placement, Shard) for place, placement in places):
        return (), None
    offsets, shape = _box(tensor)
    return offsets, tensor.detach().to_local() if math.prod(shape) else None


@dataclass(frozen=True)
class Stored:
    """A tensor in the files of a checkpoint. `pieces`: the file, offsets and shape of each piece."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    pieces: tuple[tuple[Path, Place, Place], ...]

    def full(self) -> Tensor:
        """All of it, on the CPU."""
        return self.part((0,) * len(self.shape), self.shape)

    def like(self, tensor: Tensor) -> Tensor:
        """The tensor on the device of `tensor`, sharded as that one is; only what this rank needs is read."""
        if not isinstance(tensor, DTensor):
            return self.full().to(tensor.device)
        offsets, shape = _box(tensor)
        local = self.part(offsets, shape).to(tensor.to_local().device)
        return DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )

    def part(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of `shape` that begins at `offsets`, on the CPU."""
        out = torch.empty(tuple(shape), dtype=self.dtype)
        for path, start, extent in self.pieces:
            low = [max(a, b) for a, b in zip(offsets, start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offsets, shape, start, extent, strict=True)]
            if any(a >= b for a, b in zip(low, high, strict=True)):
                continue
            out[_slices(low, high, offsets)] = self._read(path, _slices(low, high, start))
        return out

    def _read(self, path: Path, where: tuple[slice, ...]) -> Tensor:
        with safe_open(path, "pt") as file:
            return file.get_slice(self.name)[where] if where else file.get_tensor(self.name)


@dataclass(frozen=True)
class Box:
    """Where a smaller tensor stands in a larger one, and which dimensions of the larger one it has."""

    start: Place
    extent: Place
    dims: tuple[int, ...]  # ascending; along the others the box is one wide

    @property
    def shape(self) -> Place:
        """Of the smaller tensor."""
        return tuple(self.extent[dim] for dim in self.dims)


@dataclass(frozen=True)
class Joined(Stored):
    """A tensor whose boxes are tensors of their own in the files: a matrix for each expert where the model holds one of all."""

    boxes: tuple[tuple[Stored, Box], ...] = ()

    def part(self, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        out = torch.empty(tuple(shape), dtype=self.dtype)
        for stored, box in self.boxes:
            low = [max(a, b) for a, b in zip(offsets, box.start, strict=True)]
            high = [min(a + n, b + m) for a, n, b, m in zip(offsets, shape, box.start, box.extent, strict=True)]
            if all(a < b for a, b in zip(low, high, strict=True)):
                inside = [low[dim] - box.start[dim] for dim in box.dims]
                piece = stored.part(inside, [high[dim] - low[dim] for dim in box.dims])
                out[_slices(low, high, offsets)] = piece.view([b - a for a, b in zip(low, high, strict=True)])
        return out


def index_of(entries: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """By group and name the type, the shape and all ranks' pieces. `entries` holds `Part.entry` by group and name, by rank.

    Raises ValueError where the pieces do not fill a tensor.
    """
    index: dict[str, Any] = {}
    for rank in entries:
        for group, tensors in rank.items():
            known = index.setdefault(group, {})
            for name, entry in tensors.items():
                known.setdefault(name, {**entry, "pieces": []})["pieces"] += entry["pieces"]
    for group, tensors in index.items():
        for name, entry in tensors.items():
            held = sum(math.prod(piece["shape"]) for piece in entry["pieces"])
            if held != math.prod(entry["shape"]):
                raise ValueError(f"the ranks hold {held} numbers of {group}'s {name}, whose shape is {entry['shape']}")
    return index


def stored(index: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Stored]]:
    """The tensors of an index whose files stand in `folder`."""
    return {group: dict(_stored(tensors, folder)) for group, tensors in index.items()}


def _stored(tensors: Mapping[str, Any], folder: Path) -> Iterator[tuple[str, Stored]]:
    for name, entry in tensors.items():
        pieces = tuple(
            (folder / piece["file"], tuple(piece["offsets"]), tuple(piece["shape"])) for piece in entry["pieces"]
        )
        yield name, Stored(name, torch.Size(entry["shape"]), getattr(torch, entry["dtype"]), pieces)


def _box(tensor: DTensor) -> tuple[Place, Place]:
    """Offsets and shape of this rank's part."""
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(offsets), tuple(shape)


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))
