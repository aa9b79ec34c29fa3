"""20 kill -9 on buffer, learner and three collectors with a real tiny model: exactly once, and the replay is bitwise."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from common import MILES, check, finish, run
from crew import Run, kill_one_after_another, manifests
from ranks import TINY

STEPS, GROUPS, STALE = 400, 4, 1
VICTIMS = {"collector-0": 4, "collector-1": 4, "collector-2": 4, "buffer": 4, "learn": 4}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        training = Run(
            Path(folder) / "run", TINY, "--run.launcher", "processes", "--run.collectors", 3, "--algorithm.steps", STEPS,
            "--buffer.max_staleness", STALE, "--buffer.max_attempts", 100, "--buffer.lease_s", 20, "--run.restarts", 50,
            "--run.restarts_per_minute", 50, "--run.checkpoint_every", 5,
        )  # fmt: skip
        training.wait_for_step(2)
        victims = [role for role, times in VICTIMS.items() for _ in range(times)]
        random.Random(0).shuffle(victims)
        fired = kill_one_after_another(training, victims, 1, 4.0)
        code, said = training.end()
        check("kill -9 that found their process", dict(fired), sum(fired.values()) == 20)
        restarts = said.count("it is started again")
        check("restarts that the launcher has said", restarts, restarts >= 20)
        check("exit code", code, code == 0)
        trained = manifests(training.folder)
        ordinals = [ordinal for _, ordinal, _ in trained]
        check("prompts trained", len(ordinals), len(ordinals) == STEPS * GROUPS)
        check("each in exactly one step, none skipped", True, ordinals == list(range(STEPS * GROUPS)))
        stale = max(age for _, _, age in trained)
        check(f"largest staleness (S = {STALE})", stale, stale <= STALE)
        done = run([*MILES, "replay", str(training.folder)])
        print("  " + done.stdout.strip().splitlines()[-1])
        check("the replay is equal to the bit", True, "equal" in done.stdout.splitlines()[-1])
    finish()


if __name__ == "__main__":
    main()
