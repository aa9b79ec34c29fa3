"""Where payloads that are too large for the ledger's own pages lie: segment files of this machine, or an object store."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Place:
    """Where a payload lies: bytes of a segment file, or an object. Neither: inside of the ledger, or deleted."""

    segment: int | None = None
    offset: int | None = None
    object: str | None = None


class Payloads(Protocol):
    """A store of bytes that never change. What a crash leaves and no row of the ledger points at is nobody's."""

    shared: bool  # other machines read and write it too

    def append(self, payload: bytes, name: str) -> Place:
        """Store a payload; it is durable after the next `sync`. `name` (run/ordinal-hash) is unique to its content."""
        ...

    def sync(self) -> None: ...

    def read(self, place: Place, length: int) -> bytes:
        """The bytes of a payload. Raises ExperienceError where they are lost."""
        ...

    def size_of(self, name: str) -> int | None:
        """Bytes of the object that a collector has stored under this name itself; None where there is none."""
        ...

    def place_of(self, name: str) -> str:
        """The object that a collector stores under this name."""
        ...

    def delete(self, objects: Collection[str], first_segment: int | None) -> None:
        """Delete objects, and all segment files below `first_segment` (None: all that are not being written)."""
        ...

    def free_bytes(self) -> int | None:
        """Space that is left, or None where that cannot be known."""
        ...

    def close(self) -> None: ...
