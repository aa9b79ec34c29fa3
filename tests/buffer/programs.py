"""Servers that tests start on loopback: Debian's PostgreSQL, and an S3-compatible store."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

missing: set[str] = set()
"""What `need` has said of programs that are not there."""


def need(program: str) -> Path:
    """The program, or a skip that is counted; with CI=true a failure."""
    places = [shutil.which(program), *sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{program}"), reverse=True)]
    found = next((Path(place) for place in places if place), None)
    if found is not None:
        return found
    message = f"{program} is not installed (on Debian: apt-get install postgresql)"
    missing.add(message)
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Postgres:
    """One server in a folder, as a user of its own where this process is root, which PostgreSQL refuses to be."""

    def __init__(self, parent: Path | None = None) -> None:
        """`parent`: a folder that every user may enter, which pytest's are not. None: the one for temporary files."""
        self._initdb, self._postgres = need("initdb"), need("postgres")
        self._folder = Path(tempfile.mkdtemp(prefix="miles-postgres-", dir=parent))
        self._data, self._port = self._folder / "data", free_port()
        self._as: list[str] = []
        if os.geteuid() == 0:
            user = _ordinary_user()
            shutil.chown(self._folder, user)
            self._as = ["runuser", "-u", user, "--"]
        options = ["-D", str(self._data), "-U", "miles", "-A", "trust", "-E", "UTF8", "--no-locale"]
        made = subprocess.run(
            [*self._as, str(self._initdb), *options], capture_output=True, text=True, cwd=self._folder, check=False
        )
        assert made.returncode == 0, f"initdb failed: {made.stderr[-2000:]}"
        self.start()

    @property
    def url(self) -> str:
        return f"postgresql://miles@127.0.0.1:{self._port}/postgres"

    def database(self) -> str:
        """The address of a new, empty database."""
        name = f"d{uuid.uuid4().hex}"
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return f"postgresql://miles@127.0.0.1:{self._port}/{name}"

    def start(self) -> None:
        options = ["-c", "listen_addresses=127.0.0.1", "-p", str(self._port), "-k", str(self._folder)]
        command = [*self._as, str(self._postgres), "-D", str(self._data), *options]
        self._process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._folder
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self.url, connect_timeout=1).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, "PostgreSQL did not start"
                time.sleep(0.05)

    def stop(self) -> None:
        pid = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(pid, signal.SIGINT)  # fast shutdown
        self._process.wait()

    def remove(self) -> None:
        """Stop it and delete what it held."""
        self.stop()
        shutil.rmtree(self._folder)


def _ordinary_user() -> str:
    """Debian's package makes a user `postgres`; another one that owns nothing is as good."""
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"


@contextmanager
def s3_store() -> Iterator[str]:
    """`s3://bucket/prefix` of an empty store; the environment says how it is reached."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        import boto3

        boto3.client("s3", endpoint_url=settings["AWS_ENDPOINT_URL"]).create_bucket(Bucket="bucket")
        yield "s3://bucket/prefix"
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        server.stop()
