"""Six steps twice give identical metrics; so does a run that is killed with -9 after step 3 and resumed."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import MILES, ROOT, check, finish, metrics, run, steps, without_measurements

TRAIN = [*MILES, "train", "recipes/quickstart.toml", "--algorithm.steps", "6", "--run.checkpoint_every", "2"]


def killed_after(step: int, run_dir: Path) -> None:
    process = subprocess.Popen([*TRAIN, "--run", str(run_dir)], cwd=ROOT, stdout=subprocess.DEVNULL)
    file = run_dir / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and len(steps(metrics_so_far(run_dir))) >= step):
        time.sleep(0.05)
    check("still training when killed", process.poll() is None, process.poll() is None)
    process.send_signal(signal.SIGKILL)
    process.wait()


def metrics_so_far(run_dir: Path) -> list[dict]:
    try:
        return metrics(run_dir)
    except ValueError:  # the last line is being written
        return []


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        one, two, three = (Path(folder) / name for name in ("one", "two", "three"))
        run([*TRAIN, "--run", str(one)])
        run([*TRAIN, "--run", str(two)])
        expected = without_measurements(metrics(one))
        check("rows of two equal runs that differ", differing(expected, two), differing(expected, two) == 0)
        killed_after(3, three)
        run([*TRAIN, "--run", str(three), "--resume"])
        check("rows after kill -9 and resume that differ", differing(expected, three), differing(expected, three) == 0)
        check("final weights equal, bit for bit", True, same_file(one, three) and same_file(one, two))
    finish()


def differing(expected: list[dict], run_dir: Path) -> int:
    rows = without_measurements(metrics(run_dir))
    return abs(len(rows) - len(expected)) + sum(a != b for a, b in zip(rows, expected, strict=False))


def same_file(one: Path, other: Path) -> bool:
    name = "final/model.safetensors"
    return (one / name).read_bytes() == (other / name).read_bytes()


if __name__ == "__main__":
    main()
