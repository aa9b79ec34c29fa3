"""SIGKILL of one of two ranks in a step: one paragraph within 30 s, or a restart that ends bitwise as the unbroken run."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from common import MILES, ROOT, check, finish, metrics, run, steps, without_measurements
from ranks import TINY, last_complete, ranks_of

TRAIN = [*MILES, "train", str(TINY), "--parallel.shard", "2", "--algorithm.steps", "12", "--run.checkpoint_every", "2"]


def killed(run_dir: Path, *options: str) -> tuple[int, float, str]:
    """Train until step 3 is logged, kill rank 1 in what follows; the exit code, the seconds from there, what was said."""
    process = subprocess.Popen(
        [*TRAIN, "--run", str(run_dir), *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    while process.poll() is None and last_complete(run_dir) < 3:
        time.sleep(0.01)
    victim = ranks_of(process.pid)[1]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    _, said = process.communicate(timeout=600)
    return process.returncode, time.monotonic() - began, said


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        unbroken, broken, restarted = (Path(folder) / name for name in ("unbroken", "broken", "restarted"))
        run([*TRAIN, "--run", str(unbroken)])
        code, seconds, said = killed(broken)
        check("exit code after SIGKILL of rank 1", code, code == 1)
        check("seconds until the run ended (30 allowed)", round(seconds, 1), seconds < 30)
        paragraph = said[said.rindex("miles: ") :].strip() if "miles: " in said else said
        print(f"      {paragraph}")
        check(
            "the paragraph names rank, signal and log",
            True,
            all(word in paragraph for word in ("rank 1 of 2", "SIGKILL", "learner-1.log", "begins step")),
        )
        check("it is one paragraph", True, "Traceback" not in said and "\n\n" not in paragraph)
        code, _, _ = killed(restarted, "--run.restarts", "1")
        check("exit code with run.restarts = 1", code, code == 0)
        expected, found = (without_measurements(metrics(each)) for each in (unbroken, restarted))
        check("steps of the restarted run", len(steps(found)), len(steps(found)) == 12)
        check(
            "rows that differ from the unbroken run",
            sum(a != b for a, b in zip(expected, found, strict=True)),
            expected == found,
        )
        weights = [(each / "final" / "model.safetensors").read_bytes() for each in (unbroken, restarted)]
        check("final weights equal, bit for bit", True, weights[0] == weights[1])
    finish()


if __name__ == "__main__":
    main()
