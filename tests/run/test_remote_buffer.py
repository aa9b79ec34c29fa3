"""`miles train` on a buffer service: the same run, to the bit, as with the ledger in its own folder."""

from __future__ import annotations

import shutil

import pytest

from miles.buffer.client import RemoteSource
from miles.buffer.transport import Address
from tests.buffer.serving import served

pytestmark = pytest.mark.slow


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


def test_a_run_name_is_asked_for_and_a_password_refused(tools, runs):
    for changes, words in (
        (["--buffer.url", "http://127.0.0.1:1"], "buffer.run is not set"),
        (["--buffer.url", "127.0.0.1:1", "--buffer.run", "a"], "buffer.url = '127.0.0.1:1' must look like"),
        (["--buffer.run", "../x"], "buffer.run = '../x' must match"),
        (
            ["--buffer.ledger", "postgresql://u:secret@h/d", "--buffer.run", "a"],
            "buffer.ledger names a database server",
        ),
        (["--buffer.payloads", "ftp://x"], "buffer.payloads names an object store"),
    ):
        ended = tools.command("check", str(runs.recipe), *changes)
        assert ended.code == 2
        assert words in ended.message
        assert "secret" not in ended.message
