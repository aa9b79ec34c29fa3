"""The state of the global random generators, as JSON."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of the generators of python, numpy and torch (CPU)."""
    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put the generators back to what `random_state` returned."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.frombuffer(bytearray.fromhex(state["torch"]), dtype=torch.uint8))


def take_up(states: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Go on from what each rank had saved; a rank that did not exist then gets a state of its own, drawn from rank 0's."""
    if rank < len(states):
        set_random_state(states[rank])
        return
    set_random_state(states[0])
    seed = random.sample(range(2**32), rank + 1)[rank]
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
