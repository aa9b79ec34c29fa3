"""The learner's loop. Synchronous training is `buffer.max_staleness = 0`, nothing else: there is one loop, not two."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from miles.errors import BufferClosed
from miles.protocols import ExperienceSource, Learner, Publisher


class Keeper(Protocol):
    """What happens around the steps: logging, evaluation, checkpoints, and the decision to stop."""

    def span(self, name: str) -> AbstractContextManager[None]:
        """Time what is inside as `time/<name>_s` of the step."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """What is inside happens as a whole: a signal waits until its end."""
        ...

    def begin(self) -> None:
        """Evaluate where the run starts, unless that has been done."""
        ...

    def wants_more(self) -> bool:
        """Whether another step is to be trained."""
        ...

    def log_step(self, metrics: Mapping[str, float]) -> None:
        """Write down the step that led to the learner's version."""
        ...

    def after_step(self) -> None:
        """Evaluate and write a checkpoint when due."""
        ...

    def end(self) -> None:
        """Evaluate, write the last checkpoint and the final model."""
        ...


def train(learner: Learner, source: ExperienceSource, publisher: Publisher, keeper: Keeper) -> None:
    """Train until the keeper wants no more steps or the prompt stream has ended."""
    keeper.begin()
    while keeper.wants_more():
        try:
            with keeper.span("collect"):
                groups = source.take(learner.version)  # the step's manifest: the same for ever
        except BufferClosed:
            break
        batches = learner.pack(groups)
        with keeper.span("score"):
            signals = learner.score(batches)  # all forwards first; then credit and advantage over the whole step
        with keeper.whole():
            with keeper.span("update"):
                metrics = learner.update(batches, signals)  # version + 1
            with keeper.span("publish"):
                publisher.publish(learner.policy_update())  # engines sample from the new policy
            source.advance(learner.version)  # ... so collectors may go on
            keeper.log_step(metrics)
        keeper.after_step()
    keeper.end()
