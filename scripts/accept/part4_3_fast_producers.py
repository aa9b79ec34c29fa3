"""Producers that are much faster than the learner, 5 % slow groups, S in 0, 1, 2, 4: staleness never above S; S = 0 is one process."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from common import MILES, check, finish, metrics, run, steps
from crew import Run, final_weights, manifests
from ranks import TINY

REWARD = '''
"""Rewards that differ, and for one prompt in twenty come late."""

import time


def reward(prompts, completions, **columns):
    first = sum(map(ord, completions[0])) % 20
    if first == 0:
        time.sleep(0.5)
    return [float(sum(map(ord, text)) % 3) for text in completions]
'''
STEPS = 30


def memory_of(pid: int) -> int:
    """MiB that a process holds now."""
    text = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", text)
    assert found is not None
    return int(found[1]) // 1024


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "late.py").write_text(REWARD)
        # Eight epochs over the groups make the learner the slow side.
        options = [
            "--algorithm.steps", str(STEPS), "--reward.functions", f'["{folder / "late.py"}:reward"]', "--learner.epochs", "8",
            "--run.checkpoint_every", "10",
        ]  # fmt: skip
        run([*MILES, "train", str(TINY), *options, "--run", str(folder / "alone")])
        for stale in (0, 1, 2, 4):
            training = Run(
                folder / f"s{stale}", TINY, *options, "--run.launcher", "processes", "--run.collectors", 2,
                "--buffer.max_staleness", stale,
            )  # fmt: skip
            memory = []
            for step in (5, STEPS - 5):
                training.wait_for_step(step)
                if (pid := training.roles().get("buffer")) is not None:
                    memory.append(memory_of(pid))
            code, _ = training.end()
            check(f"S = {stale}: exit code", code, code == 0)
            ages = [age for _, _, age in manifests(training.folder)]
            check(f"S = {stale}: largest staleness, mean {sum(ages) / len(ages):.2f}", max(ages), max(ages) <= stale)
            check(
                f"S = {stale}: MiB of the buffer at steps 5 and {STEPS - 5}",
                memory,
                len(memory) == 2 and memory[1] < memory[0] + 16,
            )
        equal = final_weights(folder / "s0") == final_weights(folder / "alone")
        check("S = 0 equals one process, bit for bit", equal, equal)
        rows = steps(metrics(folder / "s4"))
        print(f"  learner's wait for collectors, S = 4: {sum(row['time/collect_s'] for row in rows):.2f} s of "
              f"{sum(row['time/step_s'] for row in rows):.2f} s")  # fmt: skip
    finish()


if __name__ == "__main__":
    main()
