"""The quickstart reaches 0.8 with rollouts by real vLLM, with LoRA and with full weights, and kl/behavior stays under 0.01."""

from __future__ import annotations

import tempfile
from pathlib import Path

from common import MILES, check, evals, finish, metrics, run, steps

FULL = ["--lora.rank", "none", "--learner.learning_rate", "1e-5"]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in (("LoRA", []), ("full weights", FULL)):
            target = Path(folder) / name.replace(" ", "_")
            run([*MILES, "train", "recipes/quickstart_vllm.toml", *changes, "--run", str(target)])
            rows = metrics(target)
            reward = evals(rows)[-1]["eval/reward/mean"]
            check(f"{name}: sampled held-out reward at the end > 0.8", reward, reward > 0.8)
            worst = max(row["kl/behavior"] for row in steps(rows) if "kl/behavior" in row)
            check(f"{name}: largest kl/behavior < 0.01", worst, worst < 0.01)
    finish()


if __name__ == "__main__":
    main()
