"""What a hostile or broken client can send to the buffer service. Each attack returns (kind, status) of every answer."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import pickle
import random
import socket
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import msgspec

from miles.buffer import api
from miles.buffer.client import RemoteSink
from miles.buffer.transport import Address
from miles.buffer.wire import Frame, digest_of, encode_group
from miles.types import Group, Lease

Answers = Counter[tuple[str, int]]
REFUSALS = frozenset({400, 404, 405, 408, 409, 411, 413, 414, 415, 421, 422, 431})
"""Statuses that say: refused, and nothing was done."""
WRONG_TYPE = 0xFF


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def raw_frame(group: Group) -> bytes:
    """The bytes of a group that `encode_group` would refuse to make."""
    return msgspec.msgpack.Encoder(order="deterministic").encode((1, group))


def with_segment(group: Group, **changes: Any) -> Group:
    sample = group.samples[0]
    segment = dataclasses.replace(sample.segments[0], **changes)
    return dataclasses.replace(group, samples=(dataclasses.replace(sample, segments=(segment,)), *group.samples[1:]))


def broken_groups(group: Group, vocabulary: int) -> Iterator[tuple[str, bytes]]:
    """Groups that are well formed as bytes and cannot be trained on."""
    segment = group.samples[0].segments[0]
    width = len(segment.token_ids)
    versions = (-1, *(10**6,) * (width - 1))
    yield "nan", raw_frame(with_segment(group, behavior_logprobs=(0.0, math.nan, *(-1.0,) * (width - 2))))
    yield "infinite", raw_frame(with_segment(group, behavior_logprobs=(0.0, -math.inf, *(-1.0,) * (width - 2))))
    yield "vocabulary", raw_frame(with_segment(group, token_ids=(vocabulary, *segment.token_ids[1:])))
    yield "negative token", raw_frame(with_segment(group, token_ids=(-1, *segment.token_ids[1:])))
    yield "lengths", raw_frame(with_segment(group, loss_mask=(False,)))
    yield (
        "future version",
        raw_frame(
            dataclasses.replace(
                group,
                samples=tuple(
                    with_segment(dataclasses.replace(group, samples=(each,)), versions=versions).samples[0]
                    for each in group.samples
                ),
            )
        ),
    )
    yield "other row", raw_frame(dataclasses.replace(group, row=group.row + 1))
    yield "other ordinal", raw_frame(dataclasses.replace(group, ordinal=group.ordinal + 1))
    yield "no samples", raw_frame(dataclasses.replace(group, samples=()))
    yield (
        "nan reward",
        raw_frame(
            dataclasses.replace(
                group, samples=(dataclasses.replace(group.samples[0], reward=math.nan), *group.samples[1:])
            )
        ),
    )
    yield "schema", msgspec.msgpack.Encoder(order="deterministic").encode((99, group))


def broken_bytes(good: bytes, touch: Path) -> Iterator[tuple[str, bytes]]:
    """Bytes that are no group: pickles, and headers that announce 4 GB and more."""
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        yield "pickle", pickle.dumps(Touch(touch), protocol)
    for code in (0xC6, 0xC9, 0xDB, 0xDD, 0xDF):  # bin, ext, str, array and map with a length of 32 bits
        yield "4 GB header", bytes([code]) + b"\xff\xff\xff\xff" + b"\x01" * 10
        yield "4 GB header", good[:2] + bytes([code]) + b"\xff\xff\xff\xff" + good[2:]
    yield "deep", b"\x91" * 100_000
    yield "deep", b"\x81\xa1a" * 50_000
    yield "empty", b""
    yield "longer", good + b"\x00"
    yield "extension", good[:2] + b"\xd4\x01\x00"


def random_frames(good: bytes, count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Noise, and good bytes with some of them changed, cut or doubled."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.randrange(4)
        if kind == 0:
            yield "noise", draw.randbytes(draw.randrange(400))
            continue
        frame = bytearray(good)
        if kind == 1:
            for _ in range(draw.randrange(1, 6)):
                frame[draw.randrange(len(frame))] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del frame[draw.randrange(len(frame)) :]
        else:
            place = draw.randrange(len(frame))
            frame[place:place] = frame[place : place + draw.randrange(1, 60)]
        yield ("changed", bytes(frame)) if bytes(frame) != good else ("noise", b"x")


def path_names(count: int, seed: int) -> Iterator[str]:
    """Names that try to leave the folder, or to be something else."""
    draw = random.Random(seed)
    parts = [
        "..",
        ".",
        "%2e%2e",
        "/",
        "\\",
        "%00",
        "~",
        "etc",
        "passwd",
        "C:",
        "\u202e",
        "a" * 200,
        "'",
        ";",
        "$(x)",
        " ",
        "\n",
    ]
    yield from ("..", ".", "...", ".hidden", "a/../b", "%2e%2e%2f", "a" * 129, "")
    for _ in range(count - 8):
        yield "".join(draw.choice(parts) for _ in range(draw.randrange(1, 6)))


class Attacker:
    """Sends everything to one run of a service and counts the answers."""

    def __init__(self, url: str, run: str, make_group: Callable[[Lease], Group], vocabulary: int) -> None:
        self.url = url
        self.run = run
        self.answers: Answers = Counter()
        self._make_group = make_group
        self._vocabulary = vocabulary
        self._client = httpx2.Client(trust_env=False, timeout=30.0)

    def close(self) -> None:
        self._client.close()

    def lease(self, n: int = 1, ttl: float = 600.0) -> list[Lease]:
        async def go() -> list[Lease]:
            sink = RemoteSink(Address(self.url, self.run), wait=False)
            try:
                return await sink.lease(n, "attacker", ttl)
            finally:
                await sink.close()

        return asyncio.run(go())

    def send(self, kind: str, method: str, path: str, **request: Any) -> int:
        headers = {"content-type": api.MSGPACK, **request.pop("headers", {})}
        status = self._client.request(method, f"{self.url}{path}", headers=headers, **request).status_code
        self.answers[kind, status] += 1
        return status

    def put(self, kind: str, lease: Lease, body: bytes, digest: str | None = None, run: str | None = None) -> int:
        path = f"/v1/runs/{run or self.run}/groups/{lease.ordinal}"
        headers = {api.DIGEST: digest_of(body) if digest is None else digest}
        return self.send(kind, "PUT", path, params={"lease": lease.lease_id}, content=body, headers=headers)

    def bodies(self, lease: Lease, frames: int, touch: Path) -> Frame:
        """Every bad body under a lease that is held; the good frame for it."""
        group = self._make_group(lease)
        good = encode_group(group)
        for kind, body in broken_groups(group, self._vocabulary):
            self.put(kind, lease, body)
        for kind, body in broken_bytes(good.payload, touch):
            self.put(kind, lease, body)
        forged = dataclasses.replace(lease, lease_id="forged")  # for bytes that may happen to be a group
        for kind, body in random_frames(good.payload, frames, seed=1):
            self.put(kind, forged, body)
            self.put("hash", lease, good.payload, digest=digest_of(body))
        return good

    def calls(self, frames: int) -> None:
        """Random bodies to every route that reads one."""
        draw = random.Random(2)
        routes = [
            "",
            "/lease",
            "/renew",
            "/release",
            "/drop",
            "/steps/0",
            "/commit",
            "/rewind",
            "/version",
            "/end",
            "/restore",
        ]
        for _ in range(frames):
            body = draw.randbytes(draw.randrange(200))
            self.send("call", "POST", f"/v1/runs/{self.run}{draw.choice(routes)}", content=body)
        huge = {"n": 2**62, "worker": "w", "ttl": 1.0, "session": "s", "number": 0, "wait": 1e308}
        self.send("counts", "POST", f"/v1/runs/{self.run}/lease", content=msgspec.msgpack.encode(huge))
        self.send(
            "unknown field", "POST", f"/v1/runs/{self.run}/lease", content=msgspec.msgpack.encode({**huge, "x": 1})
        )

    def names(self, count: int) -> None:
        """Path-like names of runs, in the path as they are and quoted."""
        for name in path_names(count, seed=3):
            for shown in (quote(name, safe=""), quote(name, safe="/.~\\;'")):
                body = msgspec.msgpack.encode({"session": "s", "wait": 0.0})
                self.send("name", "POST", f"/v1/runs/{shown or '%20'}/steps/0", content=body)

    def leases(self, lease: Lease, good: Frame, others: str) -> None:
        """Leases that are not held, and ids of other runs."""
        forged = dataclasses.replace(lease, lease_id=uuid.uuid4().hex)
        self.put("forged lease", forged, good.payload)
        self.put("other run", lease, good.payload, run="nobody")
        self.put("other run", lease, good.payload, run=others)
        self.put("never issued", dataclasses.replace(lease, ordinal=10**6), good.payload)
        self.put("huge ordinal", dataclasses.replace(lease, ordinal=2**70), good.payload)

    def raw(self, kind: str, request: bytes, cut: bool = False) -> None:
        """Bytes on the wire, with `cut` then the end of the connection; a connection that is cut off counts as 0."""
        host, port = self.url.removeprefix("http://").split(":")
        answer = b""
        with socket.create_connection((host, int(port)), timeout=10.0) as connection, suppress(ConnectionError):
            connection.sendall(request)
            if cut:
                connection.shutdown(socket.SHUT_WR)
            while b"\r\n" not in answer and (piece := connection.recv(65536)):
                answer += piece
        words = answer.split(b" ", 2)
        self.answers[kind, int(words[1]) if len(words) > 1 else 0] += 1

    def wire(self, lease: Lease, good: Frame) -> None:
        """Requests that no client library would send."""
        line = f"PUT /v1/runs/{self.run}/groups/{lease.ordinal}?lease={lease.lease_id} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
        head = f"{line}content-type: {api.MSGPACK}\r\n{api.DIGEST}: {good.digest}\r\n"
        size = len(good.payload)
        self.raw("4 GB body", f"{head}content-length: {4 << 30}\r\n\r\n".encode())
        self.raw("4 GB body", f"{head}content-length: {10**30}\r\n\r\n".encode())
        self.raw("no length", f"{head}\r\n".encode())
        chunks = f"{head}transfer-encoding: chunked\r\n\r\n{size:x}\r\n".encode() + good.payload + b"\r\n0\r\n\r\n"
        self.raw("chunked", chunks)
        self.raw("truncated", f"{head}content-length: {size}\r\n\r\n".encode() + good.payload[: size // 2], cut=True)
        self.raw("long header", f"{head}x: {'a' * 2_000_000}\r\n\r\n".encode())
        self.raw("long path", b"GET /" + b"a" * 2_000_000 + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        self.raw("no http", random.Random(4).randbytes(300) + b"\r\n\r\n")
