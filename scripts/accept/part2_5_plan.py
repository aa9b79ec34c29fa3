"""A plan of 70 B parameters by LoRA fits on 16 GPUs, one of full weights does not on 8 and says what would; plans are true."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from common import MILES, check, finish, run

LORA, FULL = "recipes/llama70b_ppo_lora.toml", "recipes/llama70b_ppo_full.toml"
SMALL = ["recipes/ppo_arithmetic.toml", "--lora.rank", "16", "--learner.param_dtype", "bf16"]
TRAINED = ("parameters", "gradients", "optimizer")
MINUTES = 2


def planned(recipe: list[str], gpus: int, expect: int) -> dict:
    arguments = ["--gpus", str(gpus), "--gpu-memory", "80", "--json"]
    started = time.perf_counter()
    done = run([*MILES, "plan", *recipe, *arguments], expect=expect)
    seconds = time.perf_counter() - started
    check("seconds of this plan, below 120", round(seconds, 1), seconds < 60 * MINUTES)
    return json.loads(done.stdout)


def roles_to_base(plan: dict) -> float:
    """Weights, gradients and moments of all roles, over the frozen base's weights."""
    held = dict(plan["resting"])
    held |= {f"gradients/{role}": held[f"parameters/{role}"] for role in ("actor", "critic")}
    return sum(size for kind, size in held.items() if kind.startswith(TRAINED)) / held["parameters/frozen"]


def main() -> None:
    table = run([*MILES, "plan", LORA, "--gpus", "16", "--gpu-memory", "80"], expect=0)
    for text in ("Memory of one rank", "actor", "critic", "frozen", "It fits"):
        check(f"the table says {text!r}", text in table.stdout, text in table.stdout)
    lora = planned([LORA], 16, expect=0)
    check("LoRA on 16 x 80 GiB: peak, GiB", round(lora["peak"] / 2**30, 1), lora["fits"])
    check("blocks of the real model code that ran", lora["simulated_blocks"], lora["simulated_blocks"][0] >= 4)
    ratio = roles_to_base(lora)
    check("roles / base at 70 B, at most 1.10", round(ratio, 3), ratio <= 1.10)
    small = roles_to_base(planned(SMALL, 1, expect=0))
    check("roles / base at 135 M, at most 1.7", round(small, 3), small <= 1.7)

    full = planned([FULL], 8, expect=1)
    check("full weights on 8 x 80 GiB: peak, GiB", round(full["peak"] / 2**30, 1), not full["fits"])
    ways = [change["what"] for change in full["changes"] if change["fits"]]
    check("what would fit", ways, bool(ways))

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        run([MILES[0], "benchmarks/plan/compare.py", "--out", str(results)], expect=0)
        rows = json.loads(results.read_text())
    for row in rows:
        off = row["plan"] / row["live"] - 1
        check(f"plan against the real peak, {row['case']}, {row['ranks']} ranks", f"{off:+.1%}", abs(off) <= 0.10)
    finish()


if __name__ == "__main__":
    main()
