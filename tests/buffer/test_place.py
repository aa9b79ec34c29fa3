"""Where a ledger may stand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from miles.buffer.place import RunLock, network_file_system, refuse_network_file_system
from miles.errors import RunDirError

MOUNTS = """\
/dev/sda / ext4 rw 0 0
server:/export /data nfs4 rw 0 0
/dev/sdb /data/local xfs rw 0 0
fs /with\\040space lustre rw 0 0
//nas/share /mnt cifs rw 0 0
tmpfs /mnt tmpfs rw 0 0
user@host: /far fuse.sshfs rw 0 0
short line
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/x", None),
        ("/data", "nfs4"),
        ("/data/runs/a", "nfs4"),
        ("/database", None),
        ("/data/local/a", None),
        ("/with space/a", "lustre"),
        ("/mnt/a", None),
        ("/far/a", "fuse.sshfs"),
    ],
)
def test_the_deepest_and_last_mount_decides(path: str, kind: str | None) -> None:
    assert network_file_system(Path(path), MOUNTS) == kind


def test_network_file_systems_are_refused(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    refuse_network_file_system(tmp_path, mounts)  # no such file: not Linux, nothing to know
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nserver:/x {tmp_path.resolve()} nfs rw 0 0\n")
    with pytest.raises(RunDirError, match=r"network file system \(nfs\).*disk of this machine with --run"):
        refuse_network_file_system(tmp_path, mounts)


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(RunDirError, match=f"in use by process {os.getpid()}: wait until it ends"):
        RunLock(tmp_path)
    lock.release()
    lock.release()
    RunLock(tmp_path).release()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=r"cannot hold a run .*choose another directory"):
        RunLock(tmp_path / "absent")
