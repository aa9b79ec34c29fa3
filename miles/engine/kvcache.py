"""Keys and values in numbered slots: room is made once and written in place, never joined anew for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 16
"""Lengths that attention sees are multiples of this: there padding a length leaves every bit of a product alone."""

_LEAST, _MOST = 64, 256  # tokens of the first room, and of what is added at most where more is not asked for


def round_up(length: int) -> int:
    """The least multiple of BLOCK >= length."""
    return -(-length // BLOCK) * BLOCK


class KVSlots:
    """One store of `slots` sequences for every layer of a model.

    Keys stand transposed, [slots, heads, width, capacity], values [slots, heads, capacity, width], in the type that
    the layer makes. Fresh room is zero: what stands behind a mask must be finite, or 0 * NaN spoils a sum.
    """

    def __init__(self) -> None:
        self.clear()

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens; what is stored stays."""
        if slots <= self._slots and length <= self._capacity:
            return
        self._slots = max(slots, self._slots)
        if length > self._capacity:
            self._capacity = max(round_up(length), _LEAST, min(2 * self._capacity, self._capacity + _MOST))
        for layer, keys in self._keys.items():
            self._keys[layer] = _grown(keys, (self._slots, *keys.shape[1:3], self._capacity))
            values = self._values[layer]
            self._values[layer] = _grown(values, (self._slots, values.shape[1], self._capacity, values.shape[3]))

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; `like` [rows, heads, tokens, width] says what they are made of at first use."""
        if layer not in self._keys:
            heads, width = like.shape[1], like.shape[3]
            self._keys[layer] = like.new_zeros(self._slots, heads, width, self._capacity)
            self._values[layer] = like.new_zeros(self._slots, heads, self._capacity, width)
        return self._keys[layer], self._values[layer]

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `sources` into the slots `targets`; the two are disjoint."""
        for layer, keys in self._keys.items():
            values = self._values[layer]
            source, target = torch.tensor(sources, device=keys.device), torch.tensor(targets, device=keys.device)
            keys[target, :, :, :length] = keys[source, :, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def wipe(self, slots: Sequence[int]) -> None:
        """Zero what these slots hold."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[list(slots)] = 0

    def clear(self) -> None:
        """Give all memory back."""
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._slots = 0
        self._capacity = 0


def _grown(old: Tensor, shape: tuple[int, ...]) -> Tensor:
    new = old.new_zeros(shape)
    new[tuple(slice(0, size) for size in old.shape)] = old
    return new
