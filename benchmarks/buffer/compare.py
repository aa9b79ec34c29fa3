"""Durable groups a second: the disk, the embedded ledger, the service, Redis and PostgreSQL, in one run.

    python benchmarks/buffer/compare.py [FOLDER] [--groups N]

Each case stores the same groups with 1 and with 16 writers. Batching is equal: with 16 writers a sync may be shared by
whoever waits, so the disk's own rate is taken with one sync for 16 writes; Redis (appendfsync always) and PostgreSQL share
syncs themselves. The embedded ledger and the service check, summarise and hash every group; the other two store bytes.
Writers of the service are processes' clients in threads. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from groups import build, disk_rate, in_parallel

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from miles.buffer.client import RemoteSink
from miles.buffer.ledger import Ledger
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.wire import encode_group
from tests.buffer.programs import Postgres, free_port
from tests.buffer.serving import BufferProcess, registered


def embedded(folder: Path, size: int, count: int, writers: int) -> float:
    stream = PromptStream(count, 0, False, count)
    ledger = Ledger(folder, LedgerSettings(count), stream, {})
    items = [(lease, build(lease.ordinal, lease.ordinal, size)) for lease in ledger.lease(count, "bench", 600.0)]

    def writer(mine: list) -> Callable[[], None]:
        return lambda: [ledger.put(lease, group) for lease, group in mine] and None

    rate = in_parallel(count, [writer(items[index::writers]) for index in range(writers)])
    ledger.close()
    return rate


def service(folder: Path, size: int, count: int, writers: int) -> float:
    stream = PromptStream(count, 0, False, count)
    with BufferProcess(folder) as process, registered(process.url, stream=stream) as source:
        sink = RemoteSink(source.address)
        leases = asyncio.run(_all(sink, count))
        items = [(lease, build(lease.ordinal, lease.ordinal, size)) for lease in leases]

        def writer(mine: list) -> Callable[[], None]:
            async def put() -> None:
                own = RemoteSink(source.address)
                for lease, group in mine:
                    await own.put(lease, group)
                await own.close()

            return lambda: asyncio.run(put())

        return in_parallel(count, [writer(items[index::writers]) for index in range(writers)])


async def _all(sink: RemoteSink, count: int) -> list:
    leases = await sink.lease(count, "bench", 600.0)
    await sink.close()
    return leases


@contextmanager
def redis_server(folder: Path) -> Iterator[int]:
    port = free_port()
    options = [
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--dir",
        str(folder),
        "--appendonly",
        "yes",
        "--appendfsync",
        "always",
    ]
    process = subprocess.Popen(["redis-server", *options, "--save", ""], stdout=subprocess.DEVNULL)
    try:
        for _ in range(100):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait()


def redis(folder: Path, size: int, count: int, writers: int) -> float:
    with redis_server(folder) as port:

        def writer(mine: list[bytes]) -> Callable[[], None]:
            def put() -> None:
                with socket.create_connection(("127.0.0.1", port)) as connection:
                    for payload in mine:
                        head = f"*3\r\n$5\r\nRPUSH\r\n$6\r\ngroups\r\n${len(payload)}\r\n".encode()
                        connection.sendall(head + payload + b"\r\n")
                        answer = connection.recv(64)
                        assert answer.startswith(b":"), answer

            return put

        return _bytes_rate(size, count, writers, writer)


def postgres(folder: Path, size: int, count: int, writers: int) -> float:
    import psycopg

    server = Postgres(folder.parent)
    try:
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute("CREATE TABLE groups (id BIGSERIAL PRIMARY KEY, payload BYTEA)")

        def writer(mine: list[bytes]) -> Callable[[], None]:
            def put() -> None:
                with psycopg.connect(server.url, autocommit=True) as connection:
                    for payload in mine:
                        connection.execute("INSERT INTO groups (payload) VALUES (%s)", (payload,))

            return put

        return _bytes_rate(size, count, writers, writer)
    finally:
        server.remove()


def _bytes_rate(size: int, count: int, writers: int, writer: Callable[[list[bytes]], Callable[[], None]]) -> float:
    payloads = [encode_group(build(index, index, size)).payload for index in range(count)]
    return in_parallel(count, [writer(payloads[index::writers]) for index in range(writers)])


def available() -> dict[str, Callable[[Path, int, int, int], float]]:
    found: dict[str, Callable[[Path, int, int, int], float]] = {"embedded": embedded, "service": service}
    if shutil.which("redis-server"):
        found["redis, appendfsync always"] = redis
    if list(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
        found["postgresql"] = postgres
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=".")
    parser.add_argument("--groups", type=int, default=400, help="groups of 64 KiB in each case")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = {}
    for size, count in ((64 << 10, options.groups), (1 << 20, options.groups // 8)):
        for writers in (1, 16):
            case = results.setdefault(f"{size >> 10} KiB, {writers} writers", {})
            payload = len(encode_group(build(0, 0, size)).payload)
            for name, rate in available().items():
                with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                    disk = disk_rate(Path(folder), payload, count, writers)
                    case[name] = round(rate(Path(folder), size, count, writers), 1)
                    case[f"{name} / disk"] = round(case[name] / disk, 3)
            case["service / embedded"] = round(case["service"] / case["embedded"], 3)
            case["mb_per_s embedded"] = round(case["embedded"] * payload / 1e6, 1)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
