"""Matrix products whose bits for one row do not depend on how many other rows there are.

A library picks another algorithm, with another order of summation, where a product has few rows, or where many rows
make another split over threads worth while. So rows go through each weight in tiles, of widths that were found to give
the same bits on this machine.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from miles.kernels.products import linear

STEP = 16
"""Rows of a decode are a multiple of this, so that most products need no padding of their own."""

_WIDTHS = (16, 32, 48, 64, 128, 256)
_BASE = 48  # the width whose bits count
_LARGE = 2**24  # of weights above this many entries (output heads) only widths that a decode needs are tried
_DECODE_WIDTHS = 64


class Tiles:
    """The widths that each shape of weight allows on this machine."""

    def __init__(self) -> None:
        self._widths: dict[tuple[torch.Size, torch.dtype, bool], list[int]] = {}

    def widths(self, layer: nn.Linear) -> list[int]:
        """Ascending. Measured on the first layer of each shape and type: a few products of up to 256 random rows."""
        key = layer.weight.shape, layer.weight.dtype, layer.bias is None
        if key not in self._widths:
            self._widths[key] = _equal_widths(layer.weight, layer.bias)
        return self._widths[key]


def tiled_linear(layer: nn.Linear, widths: list[int], x: Tensor) -> Tensor:
    """`layer` applied to x [..., K], K the layer's width, in tiles of these widths."""
    weight, bias = layer.weight, layer.bias
    rows = x.numel() // x.shape[-1]
    if rows in widths:
        return linear(x, weight, bias)
    flat = x.reshape(rows, x.shape[-1])
    out = x.new_empty(rows, len(weight))
    for start, stop, width in spans(rows, widths):
        tile = flat[start:stop]
        if stop - start < width:
            tile = F.pad(tile, (0, 0, 0, width - (stop - start)))
        out[start:stop] = linear(tile, weight, bias)[: stop - start]
    return out.unflatten(0, x.shape[:-1])


def spans(rows: int, widths: list[int]) -> list[tuple[int, int, int]]:
    """(start, stop, width) of the tiles of `rows`, largest first; the last one is padded where none is that narrow."""
    tiles, start = [], 0
    while start < rows:
        left = rows - start
        width = max((w for w in widths if w <= left), default=min(widths))
        tiles.append((start, min(start + width, rows), width))
        start += width
    return tiles


@torch.inference_mode()
def fewest_rows(device: torch.device, dtype: torch.dtype) -> int:
    """The least number of rows from which on a batched product gives a row the same bits however many there are.

    Measured with products of 2 to 64 rows; 64 where not even 32 are enough.
    """
    generator = torch.Generator().manual_seed(0)
    left = torch.randn(4, 64, 64, generator=generator).to(device, dtype)
    right = torch.randn(4, 64, 48, generator=generator).to(device, dtype)
    whole = torch.bmm(left, right)
    different = [n for n in range(2, 64) if not torch.equal(torch.bmm(left[:, :n].contiguous(), right), whole[:, :n])]
    return max(different, default=1) + 1


@torch.inference_mode()
def _equal_widths(weight: Tensor, bias: Tensor | None) -> list[int]:
    """The widths that give every row, at every place, the bits that tiles of `_BASE` rows give it."""
    most = _DECODE_WIDTHS if weight.numel() > _LARGE else _WIDTHS[-1]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(most + _BASE, weight.shape[1], generator=generator).to(weight.device, weight.dtype)
    base = torch.cat([linear(tile, weight, bias) for tile in rows[: len(rows) // _BASE * _BASE].split(_BASE)])
    widths = [_BASE]
    for width in _WIDTHS:
        if width <= most and width != _BASE:
            first = torch.equal(linear(rows[:width], weight, bias), base[:width])
            if first and torch.equal(linear(rows[:width].flip(0), weight, bias).flip(0), base[:width]):
                widths.append(width)
    return sorted(widths)
