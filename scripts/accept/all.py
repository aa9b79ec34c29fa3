"""Runs the acceptance scripts, one for each promised line: all of them, or those of the parts that are named (`1`)."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main(parts: list[str]) -> int:
    scripts = sorted(HERE.glob("part*.py"))
    if parts:
        scripts = [script for script in scripts if script.name[4] in parts]
    if not scripts:
        print(f"no acceptance scripts of part {', '.join(parts)}", file=sys.stderr)
        return 2
    failed = []
    for script in scripts:
        first_line = script.read_text().split('"""')[1].strip()
        print(f"\n=== {script.stem}: {first_line}", flush=True)
        started = time.perf_counter()
        if subprocess.run([sys.executable, script], cwd=HERE, check=False).returncode:
            failed.append(script.stem)
        print(f"    ({time.perf_counter() - started:.0f} s)", flush=True)
    print(f"\n{len(scripts) - len(failed)} of {len(scripts)} lines hold" + "".join(f"\n  failed: {f}" for f in failed))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
