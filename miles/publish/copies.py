"""Brings new weights to engines that keep a copy of their own, in other processes or on other machines: through files."""

from __future__ import annotations

from miles.protocols import Publisher
from miles.publish.files import WeightFiles
from miles.types import PolicyUpdate

KEPT = 2
"""Newest versions that stay: a collector may still be reading the one before the newest."""


class CopiesPublisher:
    """Writes each version as files, which collectors take up before their next call; nobody waits for them.

    A learner that goes on from an older version deletes what was published beyond it, so what is read is always its own.
    """

    def __init__(self, files: WeightFiles, version: int, own: Publisher) -> None:
        """`version`: that the learner begins with. `own`: of the learner's engine, which evaluates."""
        self._files, self._own = files, own
        files.forget_above(version)

    def publish(self, update: PolicyUpdate) -> None:
        """Raises EngineError where the disk is full or cannot be written."""
        self._files.write(update)
        self._files.forget([update.version - back for back in range(KEPT)])
        self._own.publish(update)
