"""The service over HTTP: the same protocols as the embedded buffer, each call once however often it comes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from miles.buffer import api
from miles.buffer.client import RemoteSink, RemoteSource
from miles.buffer.serve import Options, check, how_to_join
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.errors import (
    BadInput,
    BufferClosed,
    ExperienceError,
    GroupRefused,
    LearnerFenced,
    LeaseLost,
    LedgerLost,
    NothingToTrain,
    PoisonedData,
    RunDirError,
)
from miles.protocols import ExperienceSink, ExperienceSource
from miles.types import Group, Lease
from miles.web.listen import parse_listen

from .serving import STREAM, registered, served

Make = Callable[..., Group]
TOKEN = "0123456789abcdef0123"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with served(tmp_path / "buffer") as (url, _):
        yield url


async def collect(address: Address, make_group: Make, stream: PromptStream = STREAM, rounds: int = 1) -> list[Lease]:
    """Lease all that can be had and finish it."""
    sink, done = RemoteSink(address, wait=False), []
    for _ in range(rounds):
        for lease in await sink.lease(100, "w", 60.0):
            await sink.put(lease, make_group(lease.ordinal, stream.at(lease.ordinal).row, lease.min_version))
            done.append(lease)
    await sink.close()
    return done


async def test_the_protocols_over_http(url: str, make_group: Make) -> None:
    source = registered(url, max_staleness=1)
    sink = RemoteSink(source.address, wait=False)
    sides: tuple[ExperienceSink, ExperienceSource] = (sink, source)  # what pyright compares
    assert len(sides) == 2
    leases = await sink.lease(10, "w", 60.0)
    assert [lease.ordinal for lease in leases] == [0, 1, 2, 3]
    assert await sink.lease(10, "w", 60.0) == []
    assert [lease.ordinal for lease in await sink.renew(leases)] == [0, 1, 2, 3]
    group = make_group(0, 0)
    await sink.put(leases[0], group)
    await sink.put(leases[0], group)
    await sink.drop(leases[1], "solved_all: all right", make_group(1, 1))
    await sink.release(leases[3])
    (again,) = [lease for lease in await sink.lease(1, "w", 60.0) if lease.ordinal == 3]
    for lease in (leases[2], again):
        await sink.put(lease, make_group(lease.ordinal, lease.ordinal))
    groups = await asyncio.to_thread(source.take, 0)
    assert [each.ordinal for each in groups] == [0, 2]
    assert groups[0] == group
    assert source.group(1) == make_group(1, 1)
    assert [(done.ordinal, done.reason) for done in source.finished(0)] == [(0, None), (1, "solved_all"), (2, None)]
    assert source.short(0) is None
    source.advance(1)
    source.commit(1, Path("checkpoints/step_000001"))
    stats = source.stats()
    assert (stats.trained, stats.ready, stats.dropped, stats.committed) == (2, 1, 1, 1)
    await sink.close()
    source.close()


def test_registering_twice_joins_and_another_run_is_refused(url: str) -> None:
    source = registered(url)
    settings = LedgerSettings(2)
    assert source.register(settings, STREAM, {"config": "c"}, resume=True) is False
    with pytest.raises(RunDirError, match="holds a run named 'demo' already: go on with --resume"):
        source.register(settings, STREAM, {"config": "c"}, resume=False)
    with pytest.raises(RunDirError, match="config is 'c' there and 'd' here"):
        source.register(settings, STREAM, {"config": "d"}, resume=True)
    assert source.exists()
    with RemoteSource(Address(url, "other")) as other:
        assert not other.exists()
    call = api.Registration({"config": "c"}, settings, STREAM.arguments(), False, "key-1")
    codes = [
        httpx2.post(f"{url}/v1/runs/third", content=msgspec.msgpack.encode(call), headers={"content-type": api.MSGPACK})
        for _ in range(2)
    ]
    assert [code.status_code for code in codes] == [201, 201]  # the reply to the first may have been lost
    source.close()


async def test_lease_waits_for_credit_and_take_for_its_last_group(url: str, make_group: Make) -> None:
    source = registered(url)
    sink = RemoteSink(source.address)
    first = await sink.lease(2, "w", 60.0)
    waiting = asyncio.create_task(sink.lease(2, "w", 60.0))
    taking = asyncio.create_task(asyncio.to_thread(source.take, 0))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    assert not taking.done()
    for lease in first:
        await sink.put(lease, make_group(lease.ordinal, lease.ordinal))
    assert [group.ordinal for group in await taking] == [0, 1]
    assert not waiting.done()
    source.advance(1)
    assert [lease.ordinal for lease in await waiting] == [2, 3]
    await sink.close()
    source.close()


async def test_a_collector_ends_when_the_run_does(url: str, make_group: Make) -> None:
    short = PromptStream(2, 0, False, 2, epochs=1)
    source = registered(url, stream=short)
    await collect(source.address, make_group, short)
    sink = RemoteSink(source.address)
    assert await sink.lease(1, "w", 60.0) == []
    await asyncio.to_thread(source.take, 0)
    source.advance(1)
    with pytest.raises(BufferClosed, match="the prompt stream has ended"):
        source.take(1)
    other = registered(url, "other")
    waiting = RemoteSink(other.address)
    await waiting.lease(9, "w", 60.0)
    task = asyncio.create_task(waiting.lease(9, "w", 60.0))
    await asyncio.sleep(0.1)
    other.end("the learner is done")
    assert await task == []
    for each in (sink, waiting):
        await each.close()
    for each in (source, other):
        each.close()


async def test_errors_keep_their_kind_and_words(url: str, make_group: Make) -> None:
    source = registered(url, max_dropped=1, max_staleness=1, vocabulary=1000)
    sink = RemoteSink(source.address)
    first, second, *_ = await sink.lease(4, "w", 60.0)
    with pytest.raises(LeaseLost, match="ordinal 50 was never issued"):
        await sink.put(Lease(50, "x", 0.0, 0), make_group(50, 50))
    with pytest.raises(GroupRefused, match=r"row 1 of the data|stands for row 0") as refused:
        await sink.put(first, make_group(0, 1))
    assert refused.value.reason == "row"
    with pytest.raises(ExperienceError, match=r"take\(7\): the learner has reached version 0"):
        source.take(7)
    with pytest.raises(ExperienceError, match="worker 'a/b' must match"):
        await sink.lease(1, "a/b", 60.0)
    with RemoteSource(Address(url, "nobody")) as nobody, pytest.raises(LedgerLost, match="no run named 'nobody'"):
        nobody.take(0)
    assert source.take_now(0) is None
    other = RemoteSource(source.address)
    with pytest.raises(LearnerFenced):
        other.take(0)
    other.rewind(0)
    with pytest.raises(LearnerFenced):
        source.advance(1)
    await sink.drop(first, "solved_all")
    await sink.drop(second, "solved_all")
    stats = other.stats()
    assert stats.drops_by_reason == {"solved_all": 2}
    await sink.close()
    for each in (source, other):
        each.close()


async def test_nothing_to_train_and_poisoned_data_reach_the_learner(url: str, make_group: Make) -> None:
    source = registered(url, max_dropped=1)
    sink = RemoteSink(source.address)
    for lease in await sink.lease(2, "w", 60.0):
        await sink.drop(lease, "solved_all", make_group(lease.ordinal, lease.ordinal))
    with pytest.raises(NothingToTrain, match="all 2 groups were dropped"):
        source.take(0)
    poisoned = registered(url, "poisoned", stream=PromptStream(100, 0, False, 40))
    bad = RemoteSink(poisoned.address)
    for lease in await bad.lease(30, "w", 60.0):
        with pytest.raises(GroupRefused):
            await bad.put(lease, make_group(lease.ordinal, 99))
    with pytest.raises(PoisonedData, match="30 groups were refused"):
        poisoned.take(0)
    assert await bad.lease(1, "w", 60.0) == []
    for each in (sink, bad):
        await each.close()
    for other in (source, poisoned):
        other.close()


async def test_a_full_disk_is_waited_for(tmp_path: Path, make_group: Make) -> None:
    with served(tmp_path / "buffer") as (url, service):
        source = registered(url, min_free_bytes=1000)
        sink = RemoteSink(source.address)
        leases = await sink.lease(2, "w", 60.0)
        payloads = service.runs.get("demo").ledger._store.payloads
        payloads.free_bytes = lambda: 10  # type: ignore[method-assign]
        putting = asyncio.create_task(sink.put(leases[0], make_group(0, 0)))
        await asyncio.sleep(0.3)
        assert not putting.done()
        assert service.meters.answers["put", 507] > 0  # the fault fired
        payloads.free_bytes = lambda: 2000  # type: ignore[method-assign]
        await putting
        assert source.stats().ready == 1
        await sink.close()
        source.close()


async def test_many_groups_come_in_pages(url: str, make_group: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_PAGE_BYTES", 3000)
    stream = PromptStream(100, 0, False, 12)
    source = registered(url, stream=stream)
    await collect(source.address, make_group, stream)
    assert [group.ordinal for group in await asyncio.to_thread(source.take, 0)] == list(range(12))
    source.close()


async def test_a_lost_run_is_restored_from_a_snapshot(url: str, make_group: Make, tmp_path: Path) -> None:
    source = registered(url)
    await collect(source.address, make_group)
    await asyncio.to_thread(source.take, 0)
    source.advance(1)
    saved = tmp_path / "ledger.snapshot"
    saved.write_bytes(source.snapshot())
    for path in sorted((tmp_path / "buffer" / "demo").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "buffer" / "demo").rmdir()
    with pytest.raises(LedgerLost, match="was deleted or replaced while it was in use"):
        source.take(1)
    assert not source.exists()
    again = RemoteSource(source.address)
    again.restore(saved)
    again.register(LedgerSettings(2), STREAM, {"config": "c"}, resume=True)
    again.rewind(1, "resample")
    assert [lease.ordinal for lease in await collect(source.address, make_group)] == [2, 3]
    assert [group.ordinal for group in await asyncio.to_thread(again.take, 1)] == [2, 3]
    assert list((tmp_path / "buffer").glob(".incoming-*")) == []
    for each in (source, again):
        each.close()


def test_metrics_and_the_open_route(tmp_path: Path) -> None:
    with served(tmp_path / "buffer", [TOKEN]) as (url, _):
        source = registered(url, token=TOKEN)
        assert httpx2.get(f"{url}/livez").text == "ok\n"
        assert httpx2.get(f"{url}/metrics").status_code == 401
        text = httpx2.get(f"{url}/metrics", headers={"authorization": f"Bearer {TOKEN}"}).text
        assert 'miles_buffer_prompts_capacity{run="demo"} 2' in text
        assert 'miles_buffer_answers_total{route="register",status="201"} 1' in text
        source.close()


@pytest.mark.parametrize(
    "shown",
    ["", "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", "Bearer \xff\xfe"],
)
def test_every_route_but_one_needs_the_token(tmp_path: Path, shown: str) -> None:
    headers = {"authorization": shown.encode("latin-1"), "content-type": api.MSGPACK} if shown else {}
    with served(tmp_path / "buffer", [TOKEN]) as (url, service), httpx2.Client(trust_env=False) as client:
        for route in service.app().routes:
            for method in route.methods - {"HEAD"}:  # type: ignore[attr-defined]
                path = route.path.replace("{run}", "demo").replace("{ordinal:int}", "0").replace("{step:int}", "0")  # type: ignore[attr-defined]
                answer = client.request(method, url + path, headers=headers)
                assert answer.status_code == (200 if path == "/livez" else 401), path
                assert TOKEN not in answer.text


def test_the_token_is_in_no_message(tmp_path: Path) -> None:
    with served(tmp_path / "buffer", [TOKEN]) as (url, _):
        wrong = Address(url, "demo", "a-wrong-token-of-mine")
        assert "a-wrong-token-of-mine" not in repr(wrong)
        with RemoteSource(wrong) as source, pytest.raises(BadInput, match="a bearer token is needed") as error:
            source.exists()
        assert "a-wrong-token-of-mine" not in str(error.value)


def test_without_a_token_only_this_machine_is_answered(url: str) -> None:
    assert httpx2.get(f"{url}/metrics", headers={"host": "evil.example:80"}).status_code == 421
    assert httpx2.get(f"{url}/metrics", headers={"host": "localhost:80"}).status_code == 200
    registered(url).close()
    answer = httpx2.post(f"{url}/v1/runs/demo/commit", content=b"x", headers={"content-type": "text/plain"})
    assert answer.status_code == 415  # what a page in a browser may send without asking


@pytest.mark.parametrize(
    ("options", "tokens", "message"),
    [
        ({"listen": "0.0.0.0:1"}, [], "is open to other machines, and there is no token"),
        ({"listen": "example.org:1"}, [], "there is no token"),
        ({"listen": "0.0.0.0:1"}, [TOKEN], "without TLS whoever sees the network"),
        ({"tls_cert": Path("x")}, [], "belong together"),
        ({"tls_cert": Path("/no/x"), "tls_key": Path("/no/y")}, [], "/no/x does not exist"),
    ],
)
def test_what_must_not_be_started(tmp_path: Path, options: dict, tokens: list[str], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        check(Options(tmp_path, **options), tokens)


def test_what_may_be_started(tmp_path: Path) -> None:
    assert check(Options(tmp_path, "127.0.0.1:7"), []) == ("127.0.0.1", 7)
    assert check(Options(tmp_path, "[::1]:7"), []) == ("::1", 7)
    assert check(Options(tmp_path, "0.0.0.0:7", insecure=True), [TOKEN]) == ("0.0.0.0", 7)
    for wrong in ("7070", "host:", "host:x", "host:70000", ":7"):
        with pytest.raises(BadInput, match="give HOST:PORT"):
            parse_listen(wrong)
    lines = how_to_join(Options(tmp_path), ("127.0.0.1", 7), token=True)
    assert lines[1] == "join it: --buffer.url http://127.0.0.1:7 --buffer.run NAME"
    assert "MILES_BUFFER_TOKEN" in lines[2]


def test_addresses() -> None:
    for wrong in ("127.0.0.1:7", "ftp://h:1", "http://", "http://user:pass@h:1", "http://h:1/path"):
        with pytest.raises(BadInput, match=r"buffer\.url"):
            Address(wrong, "demo")
    with pytest.raises(ExperienceError, match="must match"):
        Address("http://h:1", "../demo")


def test_a_service_that_is_not_there_is_an_error_in_the_end() -> None:
    address = Address("http://127.0.0.1:9", "demo", patience=0.3)
    with RemoteSource(address) as source, pytest.raises(ExperienceError, match="cannot be reached since"):
        source.exists()


def test_groups_other_than_the_manifest_names_are_refused(url: str, make_group: Make) -> None:
    source = registered(url)
    asyncio.run(collect(source.address, make_group))
    assert source.take_now(0) is not None
    with pytest.raises(ExperienceError, match="gave other groups for step 0 than its manifest names"):
        source._page(0, [(0, "0" * 64), (1, "0" * 64)], 0)
    source.close()


def test_leases_on_the_wire_are_those_of_the_types() -> None:
    lease = Lease(3, "id", 1.5, 2)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode([lease]), type=list[Lease]) == [lease]
    assert dataclasses.asdict(lease) == msgspec.msgpack.decode(msgspec.msgpack.encode(lease))
