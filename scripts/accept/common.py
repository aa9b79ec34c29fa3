"""Shared by the acceptance scripts: run a command, say it, check a number, end with pass or fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MILES = [sys.executable, "-m", "miles"]
_failed: list[str] = []


def run(command: list[str], *, expect: int | None = 0, cwd: Path = ROOT, env: dict[str, str] | None = None, **kwargs):
    """Run a command and return the finished process; its exit code must be `expect` unless that is None."""
    shown = " ".join("python" if part == sys.executable else str(part) for part in command)
    print(f"$ {shown}", flush=True)
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, text=True, capture_output=True, check=False, **kwargs
    )
    print(f"  exit {done.returncode} after {time.perf_counter() - started:.1f} s", flush=True)
    if expect is not None and done.returncode != expect:
        print(done.stdout[-4000:], done.stderr[-4000:], sep="\n")
        check(f"exit code of {shown}", done.returncode, done.returncode == expect)
    return done


def check(what: str, value: object, passed: bool) -> None:
    print(f"{'PASS' if passed else 'FAIL'}  {what}: {value}", flush=True)
    if not passed:
        _failed.append(what)


def finish() -> None:
    """End the script: exit 1 when any check failed."""
    print("FAILED: " + "; ".join(_failed) if _failed else "all passed", flush=True)
    sys.exit(bool(_failed))


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def steps(rows: list[dict]) -> list[dict]:
    return [row for row in rows if "event" not in row]


def evals(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row.get("event") == "eval"]


def without_measurements(rows: list[dict]) -> list[dict]:
    """Rows without times, speeds and memory: what two equal runs must agree on."""
    measured = ("time", "throughput/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(measured)} for row in rows]
