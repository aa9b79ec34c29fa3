"""The service as a process: killed, behind a network that misbehaves, over TLS, and joined by `miles train`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
import trustme

from miles.buffer.client import RemoteSource
from miles.buffer.ledger import LedgerReader
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream
from miles.buffer.transport import Address
from miles.types import Group

from .crowd import Crowd, learn
from .proxy import misbehaving
from .serving import BufferProcess, registered

pytestmark = pytest.mark.slow
Make = Callable[..., Group]
ROWS, GROUPS = 120, 6
TOKEN = "0123456789abcdef0123"


def stream() -> PromptStream:
    return PromptStream(ROWS, 0, True, GROUPS, epochs=1)


def exactly_once(seen: list[list[Group]], folder: Path, staleness: int) -> None:
    """Every prompt was trained in exactly one step, and the ledger says the same."""
    assert [group.ordinal for step in seen for group in step] == list(range(ROWS))
    reader = LedgerReader(folder / "demo", "demo")
    assert reader.verify() == ROWS // GROUPS
    stats = reader.stats()
    assert (stats.trained, stats.dropped, stats.leased, stats.ready) == (ROWS, 0, 0, 0)
    assert max(step.staleness_max for step in stats.steps) <= staleness
    assert [reader.groups(step) for step in range(ROWS // GROUPS)] == seen
    reader.close()


def test_a_network_that_loses_repeats_and_reorders(tmp_path: Path, make_group: Make) -> None:
    with (
        BufferProcess(tmp_path) as service,
        misbehaving(service.url) as (url, faults),
        registered(url, stream=stream(), max_staleness=1, max_attempts=50) as source,
    ):
        crowd = Crowd(source.address, stream(), make_group, clients=6)
        crowd.start()
        seen = learn(source, crowd.check)
        crowd.join()
    exactly_once(seen, tmp_path, 1)
    assert min(faults.lost, faults.repeated, faults.late) > 20  # the faults fired


def test_killed_again_and_again(tmp_path: Path, make_group: Make) -> None:
    kills = 0

    def kill(version: int) -> None:
        """While collectors are at work, after every third step."""
        nonlocal kills
        if version % 3 == 2:
            time.sleep(0.05)
            service.kill()
            kills += 1
            service.start()

    with BufferProcess(tmp_path) as service:
        with registered(service.url, stream=stream(), patience=60.0, max_staleness=2, max_attempts=50) as source:
            crowd = Crowd(source.address, stream(), make_group, clients=3, zombies=False)
            crowd.start()
            seen = learn(source, crowd.check, after_step=kill)
            crowd.join()
        assert service.stop() == 143
    exactly_once(seen, tmp_path, 2)
    assert kills == 7


def test_a_learner_that_starts_again_takes_the_same_groups(tmp_path: Path, make_group: Make) -> None:
    with BufferProcess(tmp_path) as service, registered(service.url, stream=stream(), max_staleness=1) as first:
        crowd = Crowd(first.address, stream(), make_group, clients=2, zombies=False)
        crowd.start()
        seen = []
        for version in range(5):
            seen.append(first.take(version))
            first.advance(version + 1)
        first.commit(3, Path("step_000003"))
        with RemoteSource(first.address) as second:
            assert second.register(LedgerSettings(GROUPS, 1), stream(), {"config": "c"}, resume=True) is False
            second.rewind(3)
            again = learn(second, crowd.check, start=3)
            crowd.join()
    assert again[:2] == seen[3:5]
    exactly_once(seen[:3] + again, tmp_path, 1)


def test_tokens_and_tls(tmp_path: Path, make_group: Make) -> None:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    (tmp_path / "keys").mkdir()
    ca, cert, key = (tmp_path / "keys" / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(ca)
    certificate.cert_chain_pems[0].write_to_path(cert)
    certificate.private_key_pem.write_to_path(key)
    options = ("--tls-cert", str(cert), "--tls-key", str(key))
    with BufferProcess(tmp_path / "buffer", *options, environment={"MILES_BUFFER_TOKEN": TOKEN}) as service:
        assert service.url.startswith("https://")
        source = RemoteSource(Address(service.url, "demo", TOKEN, ca, patience=5.0))
        assert source.register(LedgerSettings(2), PromptStream(4, 0, False, 2), {}, resume=False)
        source.close()
        with pytest.raises(httpx2.ConnectError, match="certificate verify failed"):
            httpx2.get(f"{service.url}/livez", trust_env=False)
    everything = [path.read_bytes() for path in (tmp_path / "buffer").rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in content for content in everything)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--listen", "0.0.0.0:0"], "there is no token"),
        (["--listen", "nonsense"], "give HOST:PORT"),
        (["--token-file", "/does/not/exist"], "cannot be read"),
    ],
)
def test_bad_options_are_one_paragraph(tmp_path: Path, arguments: list[str], words: str) -> None:
    command = [sys.executable, "-m", "miles", "buffer", "--dir", str(tmp_path), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_a_frozen_service_is_waited_for(tmp_path: Path) -> None:
    with BufferProcess(tmp_path) as service, registered(service.url) as source:
        os.kill(service.process.pid, signal.SIGSTOP)
        waker = threading.Timer(1.0, os.kill, (service.process.pid, signal.SIGCONT))
        waker.start()
        began = time.monotonic()
        assert source.stats().issued == 0
        assert time.monotonic() - began > 0.9  # the fault fired
        waker.join()
