"""A clean clone with no virtual environment: `make demo` learns the sums in time, `make test` passes with its coverage."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from common import ROOT, check, evals, finish, metrics, run, steps


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "miles"
        run(["git", "clone", "--quiet", str(ROOT), str(clone)])
        demo = run(["make", "demo"], cwd=clone)
        print(demo.stdout[-3000:])
        rows = metrics(clone / "runs" / "quickstart")
        held_out = [row["eval/reward/mean"] for row in evals(rows)]
        seconds = sum(row["time/step_s"] for row in steps(rows))
        check("held-out reward before training (< 0.15)", held_out[0], held_out[0] < 0.15)
        check("held-out reward at the end (> 0.85)", held_out[-1], held_out[-1] > 0.85)
        check("training itself, seconds (< 240)", round(seconds, 1), seconds < 240)
        check("says where the report is", "report.html" in demo.stdout, "report.html" in demo.stdout)
        check("says where the model is", "quickstart/final" in demo.stdout, "quickstart/final" in demo.stdout)
        tests = subprocess.run(["make", "test"], cwd=clone, text=True, capture_output=True, check=False)
        print(tests.stdout[-3000:], tests.stderr[-1000:])
        check("make test, exit code (coverage of 90 % is part of it)", tests.returncode, tests.returncode == 0)
    finish()


if __name__ == "__main__":
    main()
