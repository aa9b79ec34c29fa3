"""Miles against TRL: speed and memory of GRPO and PPO on the quickstart's task, as ratios within one run."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from common import ROOT, check, finish, run


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        done = run(["make", "bench-trl", f"BENCH_TRL_ARGS=--out {out}"], cwd=ROOT)
        print(done.stdout[-3000:])
        results = json.loads(out.read_text())
    for side, speed, memory in (("grpo", 3.0, 0.5), ("ppo", 2.5, 0.6)):
        result = results[side]
        check(f"{side}: samples/s, Miles / TRL (>= {speed})", result["speed"], result["speed"] >= speed)
        check(f"{side}: peak memory, Miles / TRL (<= {memory})", result["memory"], result["memory"] <= memory)
        rewards = {name: sum(r["mean_reward"] for r in result[name]) / len(result[name]) for name in ("miles", "trl")}
        no_worse = rewards["miles"] >= rewards["trl"] - 0.05
        check(f"{side}: mean reward over the steps, not worse", rewards, no_worse)
    finish()


if __name__ == "__main__":
    main()
