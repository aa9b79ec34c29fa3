"""Sampling seeds as a pure function of who asks, so that a run, its resume and its replay draw the same tokens."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: str | int) -> int:
    """63 bits of BLAKE2b over the parts, joined by colons: unrelated for different parts, the same on every machine."""
    text = ":".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def sample_seeds(run_seed: int, ordinal: int, n: int) -> list[int]:
    """The seed of each sample of a training group: derive_seed("train", run seed, ordinal, index of the sample)."""
    return [derive_seed("train", run_seed, ordinal, index) for index in range(n)]


def evaluation_seeds(run_seed: int, row: int, n: int) -> list[int]:
    """The seeds of a held-out row: the same in every evaluation of a run, and none of training's."""
    return [derive_seed("eval", run_seed, row, index) for index in range(n)]
