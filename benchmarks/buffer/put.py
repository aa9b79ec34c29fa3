"""Durable groups per second of the ledger, beside what the disk itself does with the same bytes.

    python benchmarks/buffer/put.py [FOLDER]

Prints one JSON object. `disk` appends the same number of bytes to a plain file and syncs it, as often as the ledger
commits: the ratio to it says what the ledger costs on this disk, whatever the disk is. All in one process, one client.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from miles.buffer.ledger import Ledger
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.wire import encode_group
from miles.types import Group, Sample, Segment

CASES = [
    ("64 KiB, one by one", 64 << 10, 1, 64),
    ("64 KiB, 8 at a time", 64 << 10, 8, 256),
    ("1 MiB, segments", 1 << 20, 1, 32),
]
SAMPLES = 8


def build(ordinal: int, size: int) -> Group:
    """A group whose encoding has about `size` bytes: 8 samples, each token with a distinct log-probability."""
    length = size // SAMPLES // 14
    tokens = tuple((ordinal + 17 * place) % 32000 for place in range(length))
    logprobs = tuple(-1 / (place + 3) for place in range(length))
    segment = Segment(tokens, (True,) * length, logprobs, (0,) * length)
    return Group(ordinal, ordinal, tuple(Sample((segment,), "stop", "", float(index)) for index in range(SAMPLES)))


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(folder: Path, size: int, batch: int, count: int) -> dict[str, float]:
    """Groups per second of the ledger, of its encoding alone, and of the disk alone."""
    stream = PromptStream(count, 0, False, count)
    ledger = Ledger(folder, LedgerSettings(count), stream, {})
    leases = ledger.lease(count, "bench", 600.0)
    items = [(lease, build(lease.ordinal, size)) for lease in leases]
    payload = len(encode_group(items[0][1]).payload)

    def put() -> None:
        for start in range(0, count, batch):
            ledger.put_many(items[start : start + batch])

    with (folder / "plain").open("wb", buffering=0) as file:

        def append() -> None:
            for _ in range(0, count, batch):
                file.write(bytes(payload * batch))
                os.fsync(file.fileno())

        disk = seconds(append)
    encoding = seconds(lambda: [encode_group(group) for _, group in items])
    stored = seconds(put)
    ledger.close()
    return {
        "payload_bytes": payload,
        "groups_per_s": round(count / stored, 1),
        "mb_per_s": round(count * payload / stored / 1e6, 1),
        "encode_groups_per_s": round(count / encoding, 1),
        "disk_groups_per_s": round(count / disk, 1),
        "ratio_to_disk": round(disk / stored, 3),
    }


def main() -> None:
    parent = sys.argv[1] if len(sys.argv) > 1 else "."
    results = {}
    for name, size, batch, count in CASES:
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            results[name] = measure(Path(folder), size, batch, count)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
