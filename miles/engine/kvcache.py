"""Keys and values in numbered slots: room is made once and written in place, never joined anew for each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 16
"""Lengths that attention sees are multiples of this: there padding a length leaves every bit of a product alone."""

_MOST = 256  # tokens of room added beyond what is asked for, at most: room costs time too, it is zeroed


def round_up(length: int) -> int:
    """The least multiple of BLOCK >= length."""
    return -(-length // BLOCK) * BLOCK


class _Store:
    """Keys and values of every layer, in the type that the layer makes.

    Fresh room is zero: what stands behind a mask must be finite, or 0 * NaN spoils a sum.
    """

    _slot_axis: int
    _key_token_axis: int
    _value_token_axis: int

    def __init__(self) -> None:
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._slots = 0
        self._capacity = 0

    def reserve(self, slots: int, length: int) -> None:
        """Make room for `slots` sequences of `length` tokens; what is stored stays."""
        if slots <= self._slots and length <= self._capacity:
            return
        self._slots = max(slots, self._slots)
        if length > self._capacity:
            self._capacity = max(round_up(length), min(2 * self._capacity, self._capacity + _MOST))
        for layer in self._keys:
            self._keys[layer] = self._grown(self._keys[layer], self._key_token_axis)
            self._values[layer] = self._grown(self._values[layer], self._value_token_axis)

    def move(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` tokens of the slots `sources` into the slots `targets`; the two are disjoint."""
        for tensors, axis in ((self._keys, self._key_token_axis), (self._values, self._value_token_axis)):
            for tensor in tensors.values():
                tokens = tensor.narrow(axis, 0, length)
                source = tokens.index_select(self._slot_axis, torch.tensor(sources, device=tensor.device))
                tokens.index_copy_(self._slot_axis, torch.tensor(targets, device=tensor.device), source)

    def wipe(self, slots: Sequence[int]) -> None:
        """Zero what these slots hold."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor.index_fill_(self._slot_axis, torch.tensor(list(slots), dtype=torch.long, device=tensor.device), 0)

    def _grown(self, old: Tensor, axis: int) -> Tensor:
        shape = list(old.shape)
        shape[self._slot_axis], shape[axis] = self._slots, self._capacity
        new = old.new_zeros(shape)
        new[tuple(slice(0, size) for size in old.shape)] = old
        return new


class PromptStore(_Store):
    """Written once a prompt, read by many queries: keys [slots, heads, width, tokens], values [.., tokens, width]."""

    _slot_axis, _key_token_axis, _value_token_axis = 0, 3, 2

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values; `like` [rows, heads, tokens, width] says what they are made of at first use."""
        if layer not in self._keys:
            heads, width = like.shape[1], like.shape[3]
            self._keys[layer] = like.new_zeros(self._slots, heads, width, self._capacity)
            self._values[layer] = like.new_zeros(self._slots, heads, self._capacity, width)
        return self._keys[layer], self._values[layer]


class SampleStore(_Store):
    """Written at each token by every sample: both [tokens, slots, heads, width], so that one step's writes lie together."""

    _slot_axis, _key_token_axis, _value_token_axis = 1, 0, 0

    def layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values; `like` [rows, heads, tokens, width] says what they are made of at first use."""
        if layer not in self._keys:
            shape = self._capacity, self._slots, like.shape[1], like.shape[3]
            self._keys[layer], self._values[layer] = like.new_zeros(shape), like.new_zeros(shape)
        return self._keys[layer], self._values[layer]
