"""The figures of "How fast, how big": each measured by its benchmark in a short form, beside what is promised."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from common import check, finish, run
from part2_5_plan import LORA, SMALL, planned, roles_to_base

from miles.config.schema import Recipe

LEARNER, PLAN = "benchmarks/learner", "benchmarks/plan/compare.py"
TWO_CORES = {"OMP_NUM_THREADS": "2"}


def result(script: str, arguments: list[str], option: str, name: str) -> dict | list:
    """What a benchmark writes into a file, or into a file of a folder."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        target = folder if option == "--out" and script.endswith("ablations.py") else str(path)
        run([sys.executable, script, *arguments, option, target], env=TWO_CORES)
        return json.loads(path.read_text())


def ablation(case: str, rounds: int) -> dict:
    arguments = ["--cases", case, "--rounds", str(rounds)]
    return result(f"{LEARNER}/ablations.py", arguments, "--out", "ablations.json")["cases"][case]


def rate(arguments: list[str]) -> dict:
    return result(f"{LEARNER}/rate.py", arguments, "--json", "rate.json")


def four_roles() -> None:
    ratio = roles_to_base(planned([LORA], 16, expect=0))
    check("roles by LoRA / base at 70 B, by plan (<= 1.10)", round(ratio, 3), ratio <= 1.10)
    ratio = roles_to_base(planned(SMALL, 1, expect=0))
    check("roles by LoRA / base at 135 M, by plan (<= 1.7)", round(ratio, 3), ratio <= 1.7)
    row = ablation("ppo_roles", 1)
    memory = row["peak_gib"] / row["peak_gib_against"]
    check("peak memory of a PPO step, roles / four full copies (<= 0.5)", round(memory, 2), memory <= 0.5)


def speed() -> None:
    row = rate(["--sides", "plain"])
    part = row["part_of_torch_mm"]
    check("useful rate of a step / rate of torch.mm (>= 0.8)", round(part, 2), part >= 0.8)
    print(
        f"      / rate of the library that Miles chooses, where nothing is promised: {row['part_of_chosen_library']:.2f}"
    )
    faster = row["plain_over_separate"]
    check("plain transformers' step / ours, the same rows (>= 1)", round(faster, 2), faster >= 1)
    shared = rate(["--sides", "shared", "--samples", "8", "--prompt", "128", "--answer", "128"])["shared_over_separate"]
    check("shared / separate, 8 completions as long as their prompt (<= 0.6)", round(shared, 2), shared <= 0.6)
    shared = rate(["--sides", "shared", "--samples", "8", "--prompt", "256", "--answer", "32"])["shared_over_separate"]
    check("shared / separate, 8 completions together as long (<= 0.6)", round(shared, 2), shared <= 0.6)


def compiled() -> None:
    row = ablation("compile", 2)
    faster, default = row["seconds_against"] / row["seconds"], Recipe().learner.compile
    passed = faster >= 1.1 or not default
    check(f"compile after warm-up, times as fast (>= 1.1, or off; it is {default})", round(faster, 2), passed)


def ranks() -> None:
    rows = result(PLAN, ["--cases", "grpo", "ppo"], "--out", "plan.json")
    held = {(row["case"], row["ranks"]): row["live"] - row["live_rise"] for row in rows}
    for case in ("grpo", "ppo"):
        part = held[case, 2] / held[case, 1]
        check(f"{case}: held between steps, of 2 ranks one / 1 rank (<= 0.6)", round(part, 3), part <= 0.6)
    for row in rows:
        off = row["plan"] / row["live"] - 1
        check(
            f"{row['case']}, {row['ranks']} ranks: plan / measured peak (within 10 %)", f"{off:+.1%}", abs(off) <= 0.1
        )


def main() -> None:
    four_roles()
    speed()
    compiled()
    ranks()
    finish()


if __name__ == "__main__":
    main()
