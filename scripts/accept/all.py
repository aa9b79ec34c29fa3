"""Runs the acceptance scripts, all or those of one part (`all.py 1`), and ends with a table of what passed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main(part: str = "*") -> int:
    scripts = sorted(FOLDER.glob(f"part{part}_*.py"))
    if not scripts:
        print(f"There is no script for part {part}.")
        return 2
    results = []
    for script in scripts:
        print(f"\n=== {script.stem}", flush=True)
        started = time.perf_counter()
        passed = subprocess.run([sys.executable, str(script)], check=False).returncode == 0
        results.append((script.stem, passed, time.perf_counter() - started))
    print("\n=== summary")
    for name, passed, seconds in results:
        print(f"{'PASS' if passed else 'FAIL'}  {name}  ({seconds:.0f} s)")
    return 0 if all(passed for _, passed, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
