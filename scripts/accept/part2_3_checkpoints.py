"""A checkpoint of 2 ranks goes on on 1 and 4 with the same losses; kill -9 in 20 saves; a flipped byte is found each time."""

from __future__ import annotations

import random
import shutil
import tempfile
import time
from pathlib import Path

from common import MILES, check, finish, metrics, run, steps
from ranks import TINY, SavingRanks, difference

from miles.errors import CheckpointError
from miles.learn import checkpoint

KEYS = ("loss/policy", "grad_norm", "entropy", "reward/mean", "ratio/max")
TRAIN = [
    *MILES,
    "train",
    str(TINY),
    "--algorithm.steps",
    "6",
    "--run.checkpoint_every",
    "1",
    "--run.keep_checkpoints",
    "9",
]


def other_ranks(folder: Path) -> Path:
    """Train on 2 ranks; go on from its third step on 1 and on 4, with the groups of the ledger."""
    whole = folder / "whole"
    run([*TRAIN, "--parallel.shard", "2", "--run", str(whole)])
    expected = steps(metrics(whole))
    for ranks in (1, 4):
        copy = folder / f"on-{ranks}"
        shutil.copytree(whole, copy)
        shutil.rmtree(copy / "final")
        for version in (4, 5, 6):
            shutil.rmtree(copy / "checkpoints" / f"step_{version:06d}")
        run([*TRAIN, "--parallel.shard", str(ranks), "--run", str(copy), "--resume"])
        found = steps(metrics(copy))[3:]
        worst = max(difference(a, b, KEYS) for a, b in zip(expected[3:], found, strict=True))
        check(f"2 ranks, then {ranks}: largest relative difference in steps 4 to 6", f"{worst:.1e}", worst < 1e-5)
    return whole / "checkpoints" / "step_000006"


def killed(folder: Path, times: int) -> None:
    """Two ranks that save without end are killed with -9 after a random time: what they had finished loads."""
    moments, lost = random.Random(0), 0
    for number in range(times):
        root = folder / f"killed-{number}"
        ranks = SavingRanks(root)
        ranks.wait_for(2)
        time.sleep(moments.random() * 0.5)
        ranks.kill()
        finished = ranks.finished()
        path = checkpoint.newest(root)
        tensors, state = checkpoint.load(path)
        whole = all(bool(tensor.eq(state["version"]).all()) for tensor in tensors["model"].values())
        lost += not (whole and state["version"] >= finished and checkpoint.version_of(path) == state["version"])
        shutil.rmtree(root)
    check(f"kills of {times} after which the newest complete checkpoint did not load", lost, lost == 0)


def flipped(path: Path) -> None:
    """One bit in a random place of each file, five times."""
    places, missed, tried = random.Random(1), 0, 0
    for file in sorted(path.iterdir()):
        raw = file.read_bytes()
        for _ in range(5):
            place = places.randrange(len(raw))
            file.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << places.randrange(8)]) + raw[place + 1 :])
            tried += 1
            try:
                checkpoint.load(path)
                missed += 1
            except CheckpointError:
                pass
        file.write_bytes(raw)
    checkpoint.load(path)
    check(f"flipped bits of {tried} that were not found", missed, missed == 0)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = other_ranks(Path(folder))
        flipped(path)
        killed(Path(folder), 20)
    finish()


if __name__ == "__main__":
    main()
