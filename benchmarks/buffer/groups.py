"""Groups whose encoding has a given size, and what the disk itself does with the same bytes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from miles.types import Group, Sample, Segment

SAMPLES = 8
BYTES_PER_TOKEN = 14


def build(ordinal: int, row: int, size: int, version: int = 0) -> Group:
    """8 samples; each token has a log-probability of its own."""
    length = size // SAMPLES // BYTES_PER_TOKEN
    tokens = tuple((ordinal + 17 * place) % 32000 for place in range(length))
    logprobs = tuple(-1 / (place + 3) for place in range(length))
    segment = Segment(tokens, (True,) * length, logprobs, (version,) * length)
    return Group(ordinal, row, tuple(Sample((segment,), "stop", "", float(index)) for index in range(SAMPLES)))


def in_parallel(count: int, works: Sequence[Callable[[], None]]) -> float:
    """Groups a second when all works run at the same time, a thread each; together they do `count` groups."""
    threads = [threading.Thread(target=work) for work in works]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return count / (time.perf_counter() - begin)


def disk_rate(folder: Path, size: int, count: int, batch: int) -> float:
    """Payloads a second of a plain file: `batch` of them written, then synced."""
    with (folder / "plain").open("wb", buffering=0) as file:

        def append() -> None:
            for _ in range(0, count, batch):
                file.write(bytes(size * batch))
                os.fsync(file.fileno())

        return in_parallel(count, [append])
