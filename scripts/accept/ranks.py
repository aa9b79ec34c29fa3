"""Shared by the acceptance scripts that run several ranks: a small recipe, and what is going on in a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from common import ROOT

TINY = Path(__file__).with_name("tiny.toml")


def last_complete(run_dir: Path) -> int:
    """The last step in metrics.jsonl, 0 where there is none."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return 0
    return max((json.loads(line).get("step", 0) for line in lines if line.endswith("\n")), default=0)


def ranks_of(parent: int) -> dict[int, int]:
    """The process ids of a run's ranks, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) != parent:
                continue
            variables = dict(part.partition("=")[::2] for part in (entry / "environ").read_text().split("\0"))
        except (OSError, ValueError):
            continue
        if "RANK" in variables:
            found[int(variables["RANK"])] = int(entry.name)
    return found


def difference(a: dict, b: dict, keys: tuple[str, ...], least: float = 1e-3) -> float:
    """The largest relative difference of these metrics; numbers below `least` count as that large."""
    return max(abs(a[key] - b[key]) / max(abs(a[key]), abs(b[key]), least) for key in keys if key in a)


SAVES = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from miles.learn.channel import Channel
from miles.learn.writer import Writer

root, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(root) + ".store", 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
writer = Writer(root, keep=2, channel=Channel.open())
version = 0
while True:
    version += 1
    tensors = {name: distribute_tensor(torch.full((3001, 100), float(version)), mesh, (Shard(0),)) for name in "abc"}
    writer.save(version, {"model": tensors}, {"version": version}, {})
    if rank == 0:
        print(version, flush=True)
"""


class SavingRanks:
    """Two ranks that write one checkpoint after the other until they are killed."""

    def __init__(self, root: Path) -> None:
        self._log = Path(f"{root}.log")
        with self._log.open("wb") as log:
            self._processes = [
                subprocess.Popen(
                    [sys.executable, "-c", SAVES, str(root), str(rank)], stdout=log, cwd=ROOT,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL,
                )
                for rank in (0, 1)
            ]  # fmt: skip

    def finished(self) -> int:
        """The last version whose save has returned."""
        lines = self._log.read_text().splitlines()
        return int(lines[-1]) if lines else 0

    def wait_for(self, version: int) -> None:
        while self.finished() < version:
            assert self._processes[0].poll() is None
            time.sleep(0.01)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
