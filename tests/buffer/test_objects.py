"""Large groups in an S3-compatible store: stored by content, read back whole, deleted below the watermark."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from miles.buffer import api
from miles.buffer.backend import Where
from miles.buffer.client import RemoteSink
from miles.buffer.ledger import Ledger
from miles.buffer.objects import Objects
from miles.buffer.payloads import Place
from miles.buffer.record import record_of
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.wire import encode_group
from miles.errors import BadInput, ExperienceError, LedgerUnreachable
from miles.types import Group

from .hostile import Attacker
from .programs import s3_store
from .serving import registered, served

pytestmark = pytest.mark.slow
Make = Callable[..., Group]
LARGE = 6000  # tokens of a sample: two of them make a group of more than 128 KiB


@pytest.fixture(scope="module")
def store() -> Iterator[str]:
    with s3_store() as url:
        yield url


def test_objects_come_back_and_are_deleted(store: str) -> None:
    objects = Objects(store)
    place = objects.append(b"abc" * 100, "run/0-ab")
    assert place == Place(object="run/0-ab")
    assert objects.append(b"abc" * 100, "run/0-ab") == place  # twice is once
    assert objects.read(place, 300) == b"abc" * 100
    assert objects.size_of("run/0-ab") == 300
    with pytest.raises(ExperienceError, match="has 300 bytes, the ledger says 301"):
        objects.read(place, 301)
    objects.delete(["run/0-ab", "run/never"], None)
    assert objects.size_of("run/0-ab") is None
    with pytest.raises(ExperienceError, match="has lost the group run/0-ab"):
        objects.read(place, 300)


def test_a_store_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    with pytest.raises(LedgerUnreachable, match="took no payload"):
        Objects("s3://bucket/prefix", {"max_retries": 0}).append(b"x", "run/0")
    with pytest.raises(BadInput, match="cannot be used"):
        Objects("file:///tmp")


def test_a_ledger_puts_large_groups_into_the_store(store: str, tmp_path: Path, make_group: Make) -> None:
    settings, stream = LedgerSettings(2, keep="checkpoints"), PromptStream(10, 0, False, 2)
    ledger = Ledger(tmp_path, settings, stream, {}, run="near", where=Where(payloads=store))
    groups = []
    for version in range(3):
        for lease, length in zip(ledger.lease(2, "w", 60.0), (3, LARGE), strict=True):
            groups.append(make_group(lease.ordinal, lease.ordinal, version, length=length))
            ledger.put(lease, groups[-1])
        assert ledger.create(version)
        ledger.advance(version + 1)
    assert [group for step in range(3) for group in ledger.groups(step)] == groups
    assert not (tmp_path / "segments").exists()
    (name,) = {row["object"] for row in ledger._store.all("SELECT object FROM grp WHERE run = ? AND ordinal = 1")}
    assert Objects(store).size_of(name) > 128 << 10
    ledger.commit(2, "step_000002")
    assert Objects(store).size_of(name) is None
    assert ledger.groups(2) == groups[4:]
    ledger.close()


def test_bytes_go_straight_between_collectors_store_and_learner(store: str, tmp_path: Path, make_group: Make) -> None:
    with served(tmp_path / "buffer", where=Where(payloads=store)) as (url, service):
        source = registered(url, run="far")
        source._payloads = Objects(store)
        groups = [make_group(0, 0, length=LARGE), make_group(1, 1, length=LARGE)]

        async def collect() -> None:
            sink = RemoteSink(source.address, payloads=Objects(store))
            for lease in await sink.lease(2, "w", 60.0):
                await sink.put(lease, groups[lease.ordinal])
                await sink.put(lease, groups[lease.ordinal])
            await sink.close()

        asyncio.run(collect())
        assert service.meters.bytes_received < 10_000
        assert source.take(0) == groups
        source._payloads = None
        assert source.take(0) == groups  # also for a learner that cannot reach the store
        source.close()


def test_an_object_that_is_not_there_or_not_as_said_is_refused(store: str, tmp_path: Path, make_group: Make) -> None:
    with served(tmp_path / "buffer", where=Where(payloads=store)) as (url, _):
        source = registered(url, run="liar")
        attacker = Attacker(url, "liar", lambda lease: make_group(lease.ordinal, lease.ordinal), 1000)
        lease, _ = attacker.lease(2)
        group = make_group(0, 0)
        record = record_of(group, encode_group(group), "liar/0-nothing")
        for claim in (
            record,
            dataclasses.replace(record, object="../../etc/passwd"),
            dataclasses.replace(record, length=1),
        ):
            status = attacker.send(
                "object", "PUT", "/v1/runs/liar/groups/0", params={"lease": lease.lease_id},
                content=msgspec.msgpack.encode(claim), headers={"content-type": api.RECORD},
            )  # fmt: skip
            assert status == 422
        assert source.stats().ready == 0
        attacker.close()
        source.close()
