"""The publisher of a rank that reaches no engine of others: it gives its shards to the one that does."""

from __future__ import annotations

from miles.protocols import Publisher
from miles.types import PolicyUpdate


class FollowingPublisher:
    """Puts every tensor together with the other ranks, as rank 0 asks for them, and keeps none; then scores the canary."""

    def __init__(self, own: Publisher | None = None, *, verify: bool = True) -> None:
        """`own`: of an engine in this process. `verify`: as rank 0's publisher has it."""
        self._own, self._verify = own, verify

    def publish(self, update: PolicyUpdate) -> None:
        for _ in (update.adapter or update.weights)():
            pass
        if self._verify and update.canary is not None:
            update.canary.logprobs()
        if self._own is not None:
            self._own.publish(update)
