"""Weights that files hold under other names, or in other pieces, than the model itself: a matrix for each expert where it has one of all.

transformers knows how to turn a model's weights back into those of its files. What it does to a weight is found by doing it to
coordinates in place of numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from miles.learn.shards import Box

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FileNames:
    """Asks a model for the tensors that its files hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._known: dict[tuple[str, torch.Size], list[Box] | None] = {}

    def boxes(self, key: str, tensor: Tensor) -> dict[str, Box]:
        """By name, the tensors that fill this weight of the model; empty where they are no plain parts of it."""
        names = list(self._reverted(key, torch.empty(tensor.shape, device="meta")))
        kind = (re.sub(r"\d+", "0", key), tensor.shape)
        if kind not in self._known:
            self._known[kind] = self._traced(key, tensor.shape, names)
        found = self._known[kind]
        return {} if found is None else dict(zip(names, found, strict=True))

    def _traced(self, key: str, shape: Sequence[int], names: Sequence[str]) -> list[Box] | None:
        """In each dimension the coordinates that each tensor gets; the other dimensions are short, but the first, which names count."""
        spans: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
        axes: dict[str, list[int]] = {name: [] for name in names}
        for dim, size in enumerate(shape):
            short = [n if place in (0, dim) else min(n, 2) for place, n in enumerate(shape)]
            line = torch.arange(size, dtype=torch.int32).view(
                [size if place == dim else 1 for place in range(len(short))]
            )
            parts = self._reverted(key, line.expand(short))
            if parts.keys() != spans.keys():
                return None
            for name, part in parts.items():
                low, high = int(part.min()), int(part.max())
                axis = _axis(part, low, high)
                if axis is None:
                    return None
                spans[name].append((low, high + 1 - low))
                axes[name].append(axis)
        found = [_box(spans[name], axes[name]) for name in names]
        return None if None in found else [box for box in found if box is not None]

    def _reverted(self, key: str, tensor: Tensor) -> dict[str, Tensor]:
        return revert_weight_conversion(self._model, {key: tensor})


def _axis(part: Tensor, low: int, high: int) -> int | None:
    """The axis along which the values go from low to high, -1 where there is but one value; None where they go otherwise."""
    if low == high:
        return -1
    line = torch.arange(low, high + 1, dtype=part.dtype)
    for axis, size in enumerate(part.shape):
        if size == len(line) and torch.equal(
            part, line.view([-1 if a == axis else 1 for a in range(part.dim())]).expand(part.shape)
        ):
            return axis
    return None


def _box(spans: Sequence[tuple[int, int]], axes: Sequence[int]) -> Box | None:
    """None where the tensor is turned round."""
    dims = [dim for dim, axis in enumerate(axes) if axis >= 0]
    if [axes[dim] for dim in dims] != sorted(axes[dim] for dim in dims):
        return None
    return Box(tuple(low for low, _ in spans), tuple(size for _, size in spans), tuple(dims))
