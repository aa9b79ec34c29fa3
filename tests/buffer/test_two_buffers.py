"""Past one machine: two buffer processes on one PostgreSQL ledger and one object store; one is killed, the server is restarted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from miles.buffer.backend import Where
from miles.buffer.client import RemoteSource
from miles.buffer.ledger import LedgerReader
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.types import Group

from .crowd import Crowd, learn
from .programs import Postgres, s3_store
from .serving import BufferProcess

pytestmark = pytest.mark.slow
Make = Callable[..., Group]
ROWS, GROUPS = 60, 6


def test_one_of_two_buffers_is_killed_and_the_server_restarted(
    tmp_path: Path, make_group: Make, postgres: Postgres
) -> None:
    stream = PromptStream(ROWS, 0, True, GROUPS, epochs=1)
    url = postgres.database()

    def make(ordinal: int, row: int, version: int) -> Group:
        return make_group(ordinal, row, version, length=6000 if ordinal % 10 == 0 else 3)

    with s3_store() as payloads:
        options, settings = ("--ledger", url, "--payloads", payloads), dict(os.environ)
        with (
            BufferProcess(tmp_path / "a", *options, environment=settings) as first,
            BufferProcess(tmp_path / "b", *options, environment=settings) as second,
        ):
            fault = {3: first.kill, 6: lambda: (postgres.stop(), postgres.start())}
            done: list[int] = []

            def after_step(version: int) -> None:
                if version in fault:
                    fault[version]()
                    done.append(version)

            near = Address(f"{first.url},{second.url}", "demo", patience=300.0)
            far = Address(f"{second.url},{first.url}", "demo", patience=300.0)
            with RemoteSource(near) as source:
                source.register(LedgerSettings(GROUPS, 1, max_attempts=50), stream, {}, resume=False)
                crowds = [Crowd(near, stream, make, 2, zombies=False), Crowd(far, stream, make, 2, zombies=False)]
                for crowd in crowds:
                    crowd.start()
                seen = learn(source, lambda: [crowd.check() for crowd in crowds], after_step=after_step)
                for crowd in crowds:
                    crowd.join()
            assert done == [3, 6]  # the faults fired
            assert first.process.poll() is not None
        assert [group.ordinal for step in seen for group in step] == list(range(ROWS))
        reader = LedgerReader(tmp_path, "demo", Where(url, payloads))
        assert reader.verify() == ROWS // GROUPS
        assert [reader.groups(step) for step in range(ROWS // GROUPS)] == seen
        assert reader.stats().trained == ROWS
        reader.close()
