"""A real run on vLLM, and a service that it joins, listen on nothing but loopback; the token check and the allow-list are tested."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import MILES, ROOT, check, finish, run

RECIPE = "recipes/quickstart_vllm.toml"
SHORT = ["--algorithm.steps", "2", "--eval.rows", "0"]
LISTENS = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}


def tree(root: int) -> set[int]:
    """The process and all that it has started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError):
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> set[str]:
    """Addresses, in hexadecimal, that these processes listen on."""
    inodes = set()
    for pid in pids:
        try:
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
        except OSError:
            continue
        inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == LISTENS and row[9] in inodes}


class Watched:
    """A command whose listening sockets are looked at all the time."""

    def __init__(self, *line: str, log: Path) -> None:
        self.log, self.seen, self.looks, self.processes = log, set(), 0, 0
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*MILES, *line],
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def look(self) -> None:
        pids = tree(self.process.pid)
        self.seen |= listening(pids)
        self.looks, self.processes = self.looks + 1, max(self.processes, len(pids))
        time.sleep(0.1)

    def judge(self, what: str) -> None:
        open_to_others = sorted(address for address in self.seen if address.partition(":")[0] not in LOOPBACK)
        told = (
            f"{open_to_others} ({len(self.seen)} on loopback, {self.looks} looks at up to {self.processes} processes)"
        )
        check(
            f"{what}: sockets open to other machines",
            told,
            not open_to_others and self.looks > 10 and self.processes > 2,
        )


def main() -> None:
    done = run(
        [sys.executable, "-m", "pytest", "-q", "tests/engine/test_port.py", "tests/engine/test_joining.py", "tests/web"]
    )
    check("token check, allow-list, bodies and joining", done.stdout.strip().splitlines()[-1], "passed" in done.stdout)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = Watched("train", RECIPE, *SHORT, "--run", str(folder / "alone"), log=folder / "alone.log")
        while alone.process.poll() is None:
            alone.look()
        alone.judge("miles train with a server of its own")
        check("  its exit code", alone.process.returncode, alone.process.returncode == 0)
        service = Watched("serve", RECIPE, "--listen", "127.0.0.1:0", log=folder / "serve.log")
        while not (url := re.search(r"--engine.url (\S+)", service.log.read_text())) and service.process.poll() is None:
            service.look()
        assert url is not None, service.log.read_text()
        joined = Watched(
            "train", RECIPE, *SHORT, "--engine.url", url[1], "--run", str(folder / "joined"), log=folder / "joined.log"
        )
        while joined.process.poll() is None:
            service.look()
            joined.look()
        service.process.send_signal(signal.SIGTERM)
        service.process.wait()
        service.judge("miles serve")
        check("  of the run that joined it", sorted(joined.seen), joined.process.returncode == 0 and not joined.seen)
    finish()


if __name__ == "__main__":
    main()
