"""Whatever a hostile or broken client sends is refused with the right status; nothing is executed, stored or lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miles.buffer.wire import encode_group
from miles.types import Group, Lease

from .hostile import REFUSALS, Attacker
from .serving import registered, served

Make = Callable[..., Group]
VOCABULARY = 1000
EXPECTED = {
    "nan": 422, "infinite": 422, "vocabulary": 422, "negative token": 422, "lengths": 422, "future version": 422,
    "other row": 422, "other ordinal": 422, "no samples": 422, "nan reward": 422, "schema": 422, "pickle": 422,
    "4 GB header": 422, "deep": 422, "empty": 422, "longer": 422, "extension": 422, "noise": 422, "changed": (409, 422),
    "hash": 422, "counts": 400, "unknown field": 400, "forged lease": 409, "other run": (404, 409), "never issued": 409,
    "4 GB body": (400, 413), "no length": 411, "chunked": 411, "truncated": (0, 400, 408), "long header": (0, 400),
    "long path": (0, 400), "no http": 400,
}  # fmt: skip


@pytest.fixture
def make(make_group: Make) -> Callable[[Lease], Group]:
    return lambda lease: make_group(lease.ordinal, lease.ordinal, lease.min_version)


def test_nothing_bad_gets_through(tmp_path: Path, make: Callable[[Lease], Group]) -> None:
    touched = tmp_path / "touched"
    with served(tmp_path / "buffer") as (url, service):
        source = registered(url, vocabulary=VOCABULARY, max_refused=1.0, max_staleness=1)
        registered(url, "other", vocabulary=VOCABULARY).close()
        attacker = Attacker(url, "demo", make, VOCABULARY)
        lease, second = attacker.lease(2)
        before = source.stats()
        good = attacker.bodies(lease, 150, touched)
        attacker.calls(100)
        attacker.names(60)
        attacker.leases(lease, good, "other")
        attacker.wire(lease, good)
        for (kind, status), count in attacker.answers.items():
            expected = EXPECTED.get(kind)
            right = (expected,) if isinstance(expected, int) else expected or REFUSALS
            assert status in right, (kind, status, count)
        after = source.stats()
        assert after.refused > 0
        assert after.ready == before.ready == 0
        assert after.leased == before.leased  # nothing took a lease away or finished it
        assert not touched.exists()
        assert attacker.put("good", lease, good.payload) == 201
        assert attacker.put("replay", lease, good.payload) == 200
        assert attacker.put("good", second, attacker.bodies(second, 0, touched).payload) == 201
        assert [group.ordinal for group in source.take(0)] == [0, 1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["buffer"]
        assert sorted(path.name for path in (tmp_path / "buffer").iterdir()) == ["demo", "other"]
        assert service.bodies.in_use == 0
        assert not any(status >= 500 for (_, status) in service.meters.answers)
        attacker.close()
        source.close()


def test_work_under_an_expired_lease_is_fenced(tmp_path: Path, make: Callable[[Lease], Group]) -> None:
    with served(tmp_path / "buffer") as (url, _):
        source = registered(url)
        attacker = Attacker(url, "demo", make, VOCABULARY)
        (old,) = attacker.lease(1, ttl=0.001)
        (new, _) = attacker.lease(2)
        assert new.ordinal == old.ordinal
        frame = encode_group(make(old))
        assert attacker.put("expired", old, frame.payload) == 409
        assert attacker.put("held", new, frame.payload) == 201
        assert attacker.put("replay of an old one", old, frame.payload) == 200  # the same content is the same group
        assert source.stats().ready == 1
        attacker.close()
        source.close()


def test_bodies_in_memory_stay_below_their_budget(tmp_path: Path, make: Callable[[Lease], Group]) -> None:
    with served(tmp_path / "buffer", body_budget=100_000) as (url, service):
        source = registered(url)
        attacker = Attacker(url, "demo", make, VOCABULARY)
        lease, _ = attacker.lease(2)
        assert attacker.put("too large", lease, bytes(100_001)) == 413
        assert attacker.put("noise", lease, bytes(100_000)) == 422
        assert service.bodies.in_use == 0
        attacker.close()
        source.close()
