"""Real processes that are killed, and a disk that is full: what was acknowledged is there, and training goes on exactly."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from miles.buffer.ledger import Ledger, LedgerReader
from miles.buffer.settings import LedgerSettings
from miles.buffer.stream import PromptStream

CHILD = Path(__file__).with_name("crash_child.py")


def run_child(folder: Path, what: str, lines: int) -> tuple[list[list[str]], int, str]:
    """What the child acknowledged before it ended, or was killed right after its line number `lines`; its exit and errors."""
    command = [sys.executable, str(CHILD), str(folder), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        said = []
        for line in child.stdout:
            said.append(line.split())
            if len(said) == lines:
                child.kill()
        errors = child.stderr.read()
    return said, child.returncode, errors


def test_kill_at_any_moment_loses_nothing_and_trains_each_prompt_once(tmp_path: Path) -> None:
    rng = random.Random(5)
    put: dict[int, str] = {}
    manifests: dict[int, list[int]] = {}
    kills = 0
    while True:
        said, code, errors = run_child(tmp_path, "train", rng.randint(6, 24))
        assert code in (-signal.SIGKILL, 0), errors
        kills += code != 0
        for kind, number, *rest in (line for line in said if line[0] in ("put", "manifest")):
            if kind == "put":
                assert int(number) not in put  # nothing finished is collected again
                put[int(number)] = rest[0]
            else:
                manifests[int(number)] = [int(ordinal) for ordinal in rest]
        reader = LedgerReader(tmp_path)  # beside the log of a process that never closed it
        reader.verify()
        for ordinal, digest in put.items():
            assert reader._store.payload(ordinal).digest == digest
            assert reader.group(ordinal).ordinal == ordinal
        assert all(reader.manifest(step) == ordinals for step, ordinals in manifests.items())
        # What the child did and could not say any more before it was killed.
        for step in range(reader.stats().next_step):
            manifests.setdefault(step, reader.manifest(step))
        stored = reader._store.all("SELECT ordinal, hash FROM grp WHERE run = ?")
        put |= {row["ordinal"]: row["hash"] for row in stored}
        reader.close()
        if code == 0:
            break
    assert kills >= 3
    assert said[-1] == ["closed"]
    trained = [ordinal for step in sorted(manifests) for ordinal in manifests[step]]
    assert trained == list(range(40))
    reader = LedgerReader(tmp_path)
    assert max(step.staleness_max for step in reader.stats().steps) <= 1
    assert sorted(group.row for step in manifests for group in reader.groups(step)) == list(range(40))
    reader.close()


@pytest.mark.parametrize("length", [100, 1000])  # inline in the ledger, and in segment files
def test_a_full_disk_is_a_clear_error_and_loses_nothing(tmp_path: Path, length: int) -> None:
    said, code, errors = run_child(tmp_path, str(length), 10**9)
    assert code == 1  # the fault fired
    assert "nothing that it had acknowledged is lost. Free space on the disk" in errors
    assert len(said) > 10
    settings = LedgerSettings(groups_per_step=1000, inline_bytes=3000)
    ledger = Ledger(tmp_path, settings, PromptStream(1000, 0, True, 1000), {}, resume=True)
    assert (tmp_path / "segments").exists() == (length == 1000)
    for _, ordinal, digest in said:
        assert ledger._store.payload(int(ordinal)).digest == digest
        assert ledger.group(int(ordinal)).ordinal == int(ordinal)
    assert ledger.stats().ready in (len(said), len(said) + 1)  # the last one may be there without having been confirmed
    ledger.release_all()
    (lease,) = ledger.lease(1, "w", 60.0)
    group = ledger.group(0)
    assert ledger.put(lease, type(group)(lease.ordinal, ledger.stream.at(lease.ordinal).row, group.samples)) is True
    ledger.close()
