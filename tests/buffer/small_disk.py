"""A buffer on a disk of 16 MiB that is filled by something else and gets its space again, while collectors and a learner work.

    unshare --mount python -m tests.buffer.small_disk FOLDER PROMPTS

Mounts the disk, so it runs in a mount namespace of its own, which takes the disk along when it ends. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2

from miles.buffer.ledger import LedgerReader
from miles.buffer.stream import PromptStream
from miles.types import Group

from .conftest import build_group
from .crowd import Crowd, learn
from .serving import BufferProcess, registered

DISK_MIB, OTHER_MIB = 16, 11
GROUPS, STALENESS = 6, 1
ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, prompts: int) -> list[str]:
    """How another process runs this module."""
    alone = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--mount"]
    return [*alone, sys.executable, "-m", "tests.buffer.small_disk", str(folder), str(prompts)]


def run(folder: Path, prompts: int) -> dict[str, object]:
    """In this process's environment: what `main` printed."""
    done = subprocess.run(command(folder, prompts), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def make(ordinal: int, row: int, version: int) -> Group:
    """Half of the groups go to segment files, half into the ledger's own pages."""
    return build_group(ordinal, row, version, length=6000 if ordinal % 2 else 3)


class Filler(threading.Thread):
    """Takes most of the disk, and gives it back when the buffer has refused things for want of space."""

    def __init__(self, file: Path, url: str) -> None:
        super().__init__(daemon=True)
        self.refused = 0
        self._file, self._url = file, url
        file.write_bytes(bytes(OTHER_MIB << 20))

    def run(self) -> None:
        while self.refused < 5:
            time.sleep(0.1)
            text = httpx2.get(f"{self._url}/metrics", trust_env=False).text
            self.refused = sum(int(count) for count in re.findall(r'status="507"} (\d+)', text))
        self._file.unlink()


def work(disk: Path, prompts: int) -> dict[str, object]:
    stream = PromptStream(prompts, 0, True, GROUPS, epochs=1)
    with BufferProcess(disk / "buffer") as service:
        filler = Filler(disk / "other", service.url)
        with registered(service.url, stream=stream, patience=120.0, max_staleness=STALENESS, max_attempts=50) as source:
            crowd = Crowd(source.address, stream, make, 4, zombies=False)
            crowd.start()
            filler.start()
            seen = learn(source, crowd.check)
            crowd.join()
    reader = LedgerReader(disk / "buffer" / "demo", "demo")
    stats, steps = reader.stats(), reader.verify()
    reader.close()
    trained = [group for step in seen for group in step]
    made = all(
        group == make(group.ordinal, stream.at(group.ordinal).row, group.samples[0].segments[0].versions[-1])
        for group in trained
    )
    return {
        "refused": filler.refused, "given_back": not filler.is_alive(), "trained": [group.ordinal for group in trained],
        "as_made": made, "steps": steps, "stored_trained": stats.trained, "dropped": stats.dropped,
        "staleness": max(step.staleness_max for step in stats.steps),
    }  # fmt: skip


def main(folder: str, prompts: str) -> None:
    disk = Path(folder) / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(disk)], check=True)
    print(json.dumps(work(disk, int(prompts))))


if __name__ == "__main__":
    main(*sys.argv[1:])
