"""Writes the checkpoints of a run one after the other, beside training where that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from miles.learn.channel import Channel
from miles.learn.checkpoint import oldest, prune
from miles.learn.parts import Snapshot, snapshot, write

Tensors = Mapping[str, Mapping[str, Tensor]]
Json = Mapping[str, Any]
Files = Mapping[str, bytes]


class Writer:
    """One for each rank; all ranks call `save` together. The next save waits for the one before."""

    def __init__(self, root: Path, keep: int, channel: Channel | None = None) -> None:
        """`keep`: newest checkpoints that stay. `channel`: for this writer alone, whose thread uses it beside training."""
        self._root, self._keep = root, keep
        self._channel = channel or Channel()
        self._pool = ThreadPoolExecutor(1, "miles-checkpoint")
        self._running: Future[Path] | None = None

    def save(self, version: int, tensors: Tensors, state: Json, own: Json, files: Files | None = None) -> Path:
        """Write a checkpoint, see `checkpoint.save`, prune the older ones, and return the oldest that is kept.

        `files`: contents of further files, by name.

        Raises CheckpointError, also for what the save before has failed with.
        """
        self._start(version, tensors, state, own, files, copy=False)
        path = self.wait()
        assert path is not None
        return path

    def start(self, version: int, tensors: Tensors, state: Json, own: Json, files: Files | None = None) -> None:
        """The same from a copy in host memory, while training goes on; `wait` or `finished` tell how it ended."""
        self._start(version, tensors, state, own, files, copy=True)

    def wait(self) -> Path | None:
        """Until the save that was started is whole; what `save` returns, once. Raises CheckpointError."""
        running, self._running = self._running, None
        return None if running is None else running.result()

    def finished(self) -> Path | None:
        """As `wait` for a save that has ended; None while one is under way."""
        return self.wait() if self._running is not None and self._running.done() else None

    def _start(
        self, version: int, tensors: Tensors, state: Json, own: Json, files: Files | None, *, copy: bool
    ) -> None:
        self.wait()
        part = snapshot(version, tensors, state, own, self._channel.rank, copy=copy, files=files)
        self._running = self._pool.submit(self._write, part)

    def _write(self, part: Snapshot) -> Path:
        path = write(self._root, part, self._channel)
        if self._channel.rank == 0:
            prune(self._root, self._keep)
            return oldest(self._root)
        return path
