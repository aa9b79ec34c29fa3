"""`miles train` on a buffer service: the same run, to the bit, as with the ledger in its own folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from miles.buffer.client import RemoteSource
from miles.buffer.transport import Address
from tests.buffer.programs import Postgres, s3_store
from tests.buffer.serving import served

pytestmark = pytest.mark.slow


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    server = Postgres()
    yield server
    server.remove()


def weights(runs, name: str) -> bytes:
    return (runs[name] / "final" / "model.safetensors").read_bytes()


def test_training_on_a_service_equals_training_in_a_folder(runs, tools, tmp_path):
    with served(tmp_path / "buffer") as (url, _):
        remote = {"buffer__url": url, "buffer__run": "demo"}
        assert runs.train("near", algorithm__steps=4).code == 0
        ended = runs.train("far", algorithm__steps=2, run__checkpoint_every=1, **remote)
        assert ended.code == 0, ended.err
        assert not (runs["far"] / "ledger.sqlite").exists()
        again = runs.train("far", resume=True, algorithm__steps=4, run__checkpoint_every=1, **remote)
        assert again.code == 0, again.err
        assert weights(runs, "near") == weights(runs, "far")
        for command in ("replay", "export-samples"):
            assert "is kept by the buffer at http://127.0.0.1" in tools.command(command, str(runs["far"])).message
        with RemoteSource(Address(url, "demo")) as source:
            assert source.stats().trained == source.stats().issued > 0
        taken = runs.train("other", algorithm__steps=2, **remote)
        assert taken.code == 2
        assert "holds a run named 'demo' already" in taken.err


def test_a_service_that_lost_its_disk_gets_the_run_back(runs, tmp_path):
    assert runs.train("near", algorithm__steps=4).code == 0
    with served(tmp_path / "buffer") as (url, _):
        ended = runs.train("far", algorithm__steps=2, run__checkpoint_every=1, buffer__url=url, buffer__run="demo")
        assert ended.code == 0, ended.err
    shutil.rmtree(tmp_path / "buffer")
    with served(tmp_path / "buffer") as (url, _):  # at another port, too
        again = runs.train("far", resume=True, algorithm__steps=4, buffer__url=url, buffer__run="demo")
        assert again.code == 0, again.err
    assert weights(runs, "near") == weights(runs, "far")


def test_training_on_postgresql_and_an_object_store_equals_training_in_a_folder(runs, tools, postgres):
    assert runs.train("near", algorithm__steps=4).code == 0
    with s3_store() as payloads:
        place = {"buffer__ledger": postgres.database(), "buffer__run": "demo", "buffer__payloads": payloads}
        ended = runs.train("far", algorithm__steps=2, run__checkpoint_every=1, **place)
        assert ended.code == 0, ended.err
        again = runs.train("far", resume=True, algorithm__steps=4, run__checkpoint_every=1, **place)
        assert again.code == 0, again.err
        assert not (runs["far"] / "ledger.sqlite").exists()
        assert weights(runs, "near") == weights(runs, "far")
        replayed = tools.command("replay", str(runs["far"]))
        assert replayed.code == 0, replayed.err
        assert tools.command("export-samples", str(runs["far"]), "--format", "jsonl").code == 0
        taken = runs.train("other", algorithm__steps=2, **place)
        assert taken.code == 2
        assert "already holds a run" in taken.err


def test_a_run_name_is_asked_for_and_a_password_refused(tools, runs):
    for changes, words in (
        (["--buffer.url", "http://127.0.0.1:1"], "buffer.run is not set"),
        (["--buffer.url", "127.0.0.1:1", "--buffer.run", "a"], "buffer.url = '127.0.0.1:1' must look like"),
        (["--buffer.run", "../x"], "buffer.run = '../x' must match"),
        (["--buffer.ledger", "postgresql://u:secret@h/d", "--buffer.run", "a"], "buffer.ledger holds a password"),
        (["--buffer.payloads", "ftp://x"], "must be local or s3://"),
    ):
        ended = tools.command("check", str(runs.recipe), *changes)
        assert ended.code == 2
        assert words in ended.message
        assert "secret" not in ended.message
