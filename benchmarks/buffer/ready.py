"""How long a learner waits for a manifest that is ready, and for its groups: the service in a process of its own, over HTTP.

    python benchmarks/buffer/ready.py [FOLDER]

Prints one JSON object: milliseconds, the median and the largest of some steps.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from groups import build

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.buffer.client import RemoteSink, RemoteSource
from miles.buffer.stream import PromptStream
from tests.buffer.serving import BufferProcess, registered

GROUPS, STEPS, SIZE = 8, 40, 2000


async def fill(source: RemoteSource) -> None:
    sink = RemoteSink(source.address)
    for lease in await sink.lease(GROUPS, "bench", 600.0):
        await sink.put(lease, build(lease.ordinal, lease.ordinal, SIZE, lease.min_version))
    await sink.close()


def main(parent: str = ".") -> None:
    waits = []
    with (
        tempfile.TemporaryDirectory(dir=parent) as folder,
        BufferProcess(Path(folder)) as process,
        registered(process.url, stream=PromptStream(GROUPS * STEPS, 0, False, GROUPS)) as source,
    ):
        for version in range(STEPS):
            asyncio.run(fill(source))
            begin = time.perf_counter()
            source.take(version)
            waits.append(1000 * (time.perf_counter() - begin))
            source.advance(version + 1)
    print(json.dumps({"groups": GROUPS, "median_ms": round(median(waits), 2), "largest_ms": round(max(waits), 2)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
