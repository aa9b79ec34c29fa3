"""The publisher of an engine that samples with the learner's own weights: only the version moves."""

from __future__ import annotations

from miles.types import PolicyUpdate


class InProcessPublisher:
    """Holds the version that engines may claim for the tokens they sample."""

    def __init__(self, version: int = 0) -> None:
        self.version = version

    def publish(self, update: PolicyUpdate) -> None:
        self.version = update.version
