"""Shared by the acceptance scripts of runs in several processes: start one, find its roles, kill them, read its ledger."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import time
from collections import Counter
from pathlib import Path

from common import MILES, ROOT
from ranks import last_complete

ROLES = ("buffer", "learn", "collect")


class Run:
    """`miles train ... --run DIR` in the background."""

    def __init__(self, run_dir: Path, recipe: Path, *options: object) -> None:
        self.folder = run_dir
        command = [*MILES, "train", str(recipe), "--run", str(run_dir), *map(str, options)]
        print("$ " + " ".join(["python", *command[1:]]), flush=True)
        self._said = run_dir.with_name(f"{run_dir.name}.out")
        with self._said.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)

    def wait_for_step(self, step: int) -> bool:
        """False where the run has ended before."""
        while last_complete(self.folder) < step:
            if self.process.poll() is not None:
                return False
            time.sleep(0.02)
        return True

    def end(self, timeout: float = 900) -> tuple[int, str]:
        """The exit code, and what was said."""
        code = self.process.wait(timeout)
        return code, self._said.read_text()

    def roles(self) -> dict[str, int]:
        """Process ids by role: buffer, learn, and collectors by their names."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
                words = (place / "cmdline").read_bytes().decode().split("\0")
            except (OSError, ValueError):
                continue
            if parent == self.process.pid and (role := next((role for role in ROLES if role in words), None)):
                found[words[words.index("--worker") + 1] if role == "collect" else role] = int(place.name)
        return found

    def kill(self, role: str) -> bool:
        """Kill -9; whether there was something to kill."""
        pid = self.roles().get(role)
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True


def kill_one_after_another(run: Run, victims: list[str], seed: int, pause: float) -> Counter[str]:
    """Kill these roles at random moments while the run goes on; how often each was killed."""
    moments, fired = random.Random(seed), Counter()
    for victim in victims:
        while run.process.poll() is None:
            time.sleep(pause * moments.random())
            if run.kill(victim):
                fired[victim] += 1
                break
    return fired


def manifests(run_dir: Path) -> list[tuple[int, int, int]]:
    """(step, ordinal, versions between the oldest weights that sampled it and the learner's) of all that was trained."""
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        return db.execute(
            "SELECT manifest.step, manifest.ordinal, manifest.step - grp.version_min FROM manifest JOIN grp USING (run, ordinal) "
            "ORDER BY manifest.step, manifest.pos"
        ).fetchall()


def final_weights(run_dir: Path) -> bytes:
    return (run_dir / "final" / "model.safetensors").read_bytes()
