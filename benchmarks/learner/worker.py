"""Sides of a benchmark that live at the same time, each in a process of its own, and step when they are told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SETTINGS = {"GOMP_SPINCOUNT": "10000", "THP_MEM_ALLOC_ENABLE": "1"}
"""What `miles` sets before it imports torch (`miles.run.threads`)."""


def serve(step: Callable[[], Mapping[str, Any]]) -> None:
    """In the process of a side: a step and a line of JSON for each line of the input, until it ends."""
    for _ in sys.stdin:
        Path("/proc/self/clear_refs").write_text("5")  # the highest resident memory starts anew
        start = time.perf_counter()
        numbers = step()
        seconds = time.perf_counter() - start
        print(json.dumps({**numbers, "seconds": seconds, "peak_gib": peak_gib()}), flush=True)


def peak_gib() -> float:
    """Highest resident memory since it was last started anew."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**20


class Worker:
    """Such a process; it has made its first step when it is there."""

    def __init__(self, command: list[str], settings: Mapping[str, str] = SETTINGS) -> None:
        environ = {**os.environ, **settings}
        self._process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
        )
        self.first = self.step()

    def step(self) -> dict[str, float]:
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"the process of a side ended with exit code {self._process.wait()}")
        return json.loads(answer)

    def end(self) -> None:
        self._process.stdin.close()
        self._process.wait()
