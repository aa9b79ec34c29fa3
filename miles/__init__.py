"""Miles: reinforcement-learning post-training of language models, from a laptop to a cluster."""

from __future__ import annotations

from miles.api import train
from miles.errors import MilesError

__all__ = ["MilesError", "train"]
__version__ = "0.1.0"
