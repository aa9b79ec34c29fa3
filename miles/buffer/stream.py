"""The run's prompt stream: a pure function from an ordinal to a row of the data, so that its cursor is one integer."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Any

from miles.errors import ConfigError
from miles.types import Prompt

KEPT_EPOCHS = 4


class PromptStream:
    """Epoch after epoch of all rows, each epoch in an order of its own when `shuffle` is set.

    The order of epoch e sorts the rows by 64-bit keys read from SHAKE-256 of (seed, e, num_rows), so it is the same in every
    process and Python version. Any `groups_per_step` places in a row hold different rows, also where one epoch meets the
    next: rows in the last `groups_per_step - 1` places of an epoch come back at least `groups_per_step` places later.
    """

    def __init__(
        self, num_rows: int, seed: int, shuffle: bool, groups_per_step: int, epochs: int | None = None
    ) -> None:
        """`epochs` None: endless. Raises ConfigError where one step needs more prompts than there are rows."""
        if num_rows < 1:
            raise ConfigError(f"data.source has {num_rows} rows to train on: give it at least one")
        if groups_per_step < 1:
            raise ConfigError(f"algorithm.groups_per_step is {groups_per_step}: it must be at least 1")
        if groups_per_step > num_rows:
            raise ConfigError(
                f"algorithm.groups_per_step is {groups_per_step}, but data.source has only {num_rows} rows, and a prompt "
                f"stands at most once in a step: lower algorithm.groups_per_step to {num_rows} or give more rows "
                "(see data.max_rows)"
            )
        if epochs is not None and epochs < 1:
            raise ConfigError(f"data.epochs is {epochs}: it must be at least 1, or absent")
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.groups_per_step = groups_per_step
        self.epochs = epochs
        self._orders: dict[int, array[int]] = {}

    def arguments(self) -> dict[str, Any]:
        """What it was made with: `PromptStream(**arguments)` is the same stream."""
        names = ("num_rows", "seed", "shuffle", "groups_per_step", "epochs")
        return {name: getattr(self, name) for name in names}

    @property
    def length(self) -> int | None:
        """Prompts in the whole stream. None: endless."""
        return None if self.epochs is None else self.num_rows * self.epochs

    def at(self, ordinal: int) -> Prompt:
        """The prompt at a place of the stream. Raises IndexError outside of it."""
        if ordinal < 0 or (self.length is not None and ordinal >= self.length):
            raise IndexError(f"ordinal {ordinal} is outside of the prompt stream (length {self.length})")
        epoch, place = divmod(ordinal, self.num_rows)
        row = self._order(epoch)[place] if self.shuffle else place
        return Prompt(ordinal=ordinal, epoch=epoch, row=row)

    def _order(self, epoch: int) -> array[int]:
        if epoch not in self._orders:
            order = self._build(epoch)
            # Ordinals in use lie close together: a few epochs are enough, the one made first goes first.
            if len(self._orders) == KEPT_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return self._orders[epoch]

    def _build(self, epoch: int) -> array[int]:
        """The order of an epoch, from the nearest epoch whose last places are known."""
        tail_length = self.groups_per_step - 1
        if self.num_rows >= 3 * tail_length:
            # Moving rows to the head leaves the last places alone: the tail of the epoch before is that of its raw order.
            start = max(epoch - 1, 0)
            order = self._raw(start)
        else:
            known = [e for e in self._orders if e < epoch]
            start = max(known, default=0)
            order = self._orders[start] if known else self._raw(0)
        for following in range(start + 1, epoch + 1):
            order = _spaced(self._raw(following), order[self.num_rows - tail_length :])
        return order

    def _raw(self, epoch: int) -> array[int]:
        name = f"miles prompt stream 1 {self.seed} {epoch} {self.num_rows}".encode()
        keys = struct.unpack(f"<{self.num_rows}Q", hashlib.shake_256(name).digest(8 * self.num_rows))
        return array("Q", sorted(range(self.num_rows), key=keys.__getitem__))


def _spaced(order: array[int], tail: array[int]) -> array[int]:
    """`order` rearranged so that no row of `tail`, the end of the epoch before, returns within len(tail) places."""
    recent = set(tail)
    others = [row for row in order if row not in recent]
    if len(others) < len(tail):
        return array("Q", [*others, *tail])
    head = others[: len(tail)]
    placed = set(head)
    return array("Q", [*head, *(row for row in order if row not in placed)])
