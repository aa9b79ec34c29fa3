"""12 steps = 4 + 4 + 4 with restarts = the replay, bitwise: in one process, on a buffer service, and as processes."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

from common import MILES, ROOT, check, finish, run
from crew import final_weights
from ranks import TINY

PARTS = (4, 8, 12)


def in_parts(run_dir: Path, *options: str) -> bytes:
    """Train to 4, 8 and 12 steps, each in a command of its own; the final weights."""
    for number, steps in enumerate(PARTS):
        run([
            *MILES, "train", str(TINY), "--algorithm.steps", str(steps), "--run", str(run_dir), *options,
            *["--resume"] * bool(number),
        ])  # fmt: skip
    return final_weights(run_dir)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([*MILES, "train", str(TINY), "--algorithm.steps", "12", "--run", str(folder / "whole")])
        whole = final_weights(folder / "whole")
        check("in one process", True, in_parts(folder / "alone") == whole)
        service = subprocess.Popen(
            [*MILES, "buffer", "--dir", str(folder / "buffer"), "--listen", "127.0.0.1:0"],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        try:
            assert service.stdout is not None
            url = re.search(r"http://\S+", service.stdout.readline())
            assert url is not None
            found = in_parts(folder / "served", "--buffer.url", url[0], "--buffer.run", "demo")
        finally:
            service.terminate()
            service.wait()
        check("on a buffer service", True, found == whole)
        found = in_parts(folder / "crew", "--run.launcher", "processes", "--run.collectors", "2")
        check("as processes, two collectors", True, found == whole)
        for way in ("whole", "alone", "crew"):
            done = run([*MILES, "replay", str(folder / way), "--to", str(folder / f"{way}-replayed")])
            print("  " + done.stdout.strip().splitlines()[-2])
            again = (folder / f"{way}-replayed" / "model.safetensors").read_bytes()
            check(f"the replay of {way}", True, again == whole)
    finish()


if __name__ == "__main__":
    main()
