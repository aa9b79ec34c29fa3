"""Where a ledger may stand: on a disk of this machine, held by one process at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

from miles.errors import RunDirError

LOCK_NAME = "ledger.lock"
NETWORK_FILE_SYSTEMS = re.compile(
    r"(fuse\.)?(afs|beegfs|ceph|cifs|glusterfs|gpfs|lustre|ncpfs|nfs4?|s3fs|smb3|smbfs|sshfs|wekafs)"
)


def network_file_system(path: Path, mounts: str) -> str | None:
    """The type of the network file system that `path` (absolute) is on, or None. `mounts`: the text of /proc/self/mounts."""
    best, kind = -1, ""
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), fields[1]))
        # Of several mounts on one point the last is the one in use.
        if (point == path or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), fields[2]
    return kind if NETWORK_FILE_SYSTEMS.fullmatch(kind) else None


def refuse_network_file_system(folder: Path, mounts_file: Path = Path("/proc/self/mounts")) -> None:
    """Raises RunDirError where SQLite's locks and syncs cannot be relied on."""
    if not mounts_file.exists():
        return
    kind = network_file_system(folder.resolve(), mounts_file.read_text(errors="replace"))
    if kind is not None:
        raise RunDirError(
            f"{folder} is on a network file system ({kind}), where the ledger's locks and syncs cannot be relied on: choose "
            "a folder on a disk of this machine with --run"
        )


class RunLock:
    """Held while a process writes the ledger; the kernel gives it back when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        """Raises RunDirError while another process, or another ledger of this one, holds it, and where nothing can be written."""
        try:
            self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise RunDirError(f"{folder} cannot hold a run ({error}): choose another directory with --run") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 32).decode(errors="replace").strip() or "unknown"
            os.close(self._descriptor)
            raise RunDirError(
                f"{folder} is in use by process {holder}: wait until it ends, or choose another directory with --run"
            ) from None
        # The number is a courtesy to whoever is refused; on a full disk the lock holds without it.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, f"{os.getpid()}\n".encode())

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
