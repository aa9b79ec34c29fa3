"""100 kill -9 on buffer, learner and three collectors, 3,200 prompts, fakes for engine and learner alone: bitwise as without faults."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, check, finish
from crew import Run, kill_one_after_another, manifests
from ranks import TINY

PROMPTS, GROUPS, STALE = 3200, 8, 2
VICTIMS = {"buffer": 20, "learn": 20, "collector-0": 20, "collector-1": 20, "collector-2": 20}


def main(kills: int = sum(VICTIMS.values())) -> None:
    os.environ["LEARNER_PAUSE"] = "0.1"
    victims = [role for role, times in VICTIMS.items() for _ in range(times)]
    random.Random(0).shuffle(victims)
    victims = victims[:kills]
    steps = max(PROMPTS // GROUPS * kills // 100, 10)
    options = [
        "--run.parts", ROOT / "tests" / "run" / "fakes.py:Parts", "--run.launcher", "processes", "--run.collectors", 3,
        "--algorithm.groups_per_step", GROUPS, "--algorithm.steps", steps, "--buffer.max_staleness", STALE,
        "--buffer.max_attempts", 1000, "--buffer.lease_s", 10, "--run.restarts", 1000, "--run.restarts_per_minute", 1000,
        "--run.checkpoint_every", 5,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        calm = Run(Path(folder) / "calm", TINY, *options)
        code, said = calm.end()
        check("exit code without faults", code, code == 0)
        if code:
            print(said)
        began = time.monotonic()
        broken = Run(Path(folder) / "broken", TINY, *options)
        broken.wait_for_step(1)
        fired = kill_one_after_another(broken, victims, 1, 1.0)
        code, said = broken.end()
        print(f"  {time.monotonic() - began:.0f} s")
        check("kill -9 that found their process", f"{sum(fired.values())}: {dict(fired)}", sum(fired.values()) == kills)
        restarts = said.count("it is started again")
        check("restarts that the launcher has said", restarts, restarts >= 0.9 * kills)
        check("exit code", code, code == 0)
        if code:
            print(said)
        trained = manifests(broken.folder)
        ordinals = [ordinal for _, ordinal, _ in trained]
        check("prompts trained, each in exactly one step", len(ordinals), ordinals == list(range(steps * GROUPS)))
        stale = max(age for _, _, age in trained)
        check(f"largest staleness (S = {STALE})", stale, stale <= STALE)
        states = [(run.folder / "final" / "state.bin").read_bytes() for run in (calm, broken)]
        check("final state equals the run without faults", states[1].decode(), states[0] == states[1])
    finish()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
