"""The plan against real steps: peak bytes of the learner on 1 and 2 gloo ranks, by tensors and by the operating system.

Each case plans a step from four and five of the model's ten blocks, then makes it, with random weights. `live` counts the
bytes of all tensors of rank 0 at the fullest moment of the second step; `rise` is how far that moment lies above the rest
between steps, by the tensors and by the resident memory of the process (malloc told to give freed memory back at once).
Prints a table and writes JSON; exit code 1 where a plan is off by more than a tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MIB = 2**20
TOLERANCE = 0.10
HEADER = f"{'ranks':6}{'case':30}{'plan':>9}{'live':>9}{'ratio':>8}   rise: {'plan':>7}{'live':>9}{'resident':>10}  MiB"
CASES = {
    "grpo": {"algorithm.name": "grpo"},
    "grpo, blocks computed again": {"algorithm.name": "grpo", "learner.gradient_checkpointing": True},
    "grpo, bf16": {"algorithm.name": "grpo", "learner.param_dtype": "bf16", "learner.gradient_checkpointing": True},
    "ppo": {"algorithm.name": "ppo", "learner.gradient_checkpointing": True},
    "ppo by LoRA": {"algorithm.name": "ppo", "lora.rank": 16},
    "ppo by LoRA, bf16": {
        "algorithm.name": "ppo",
        "lora.rank": 16,
        "learner.param_dtype": "bf16",
        "learner.gradient_checkpointing": True,
    },
}
BASE = {
    "model.name": str(HERE / "model.json"),
    "data.source": "task:addition",
    "data.max_prompt_tokens": 96,
    "rollout.max_new_tokens": 96,
    "rollout.group_size": 4,
    "algorithm.groups_per_step": 2,
    "algorithm.steps": 1,
    "learner.tokens_per_microbatch": 512,
    "run.threads": 1,
}
# Freed memory goes back at once, so that the process's memory follows its tensors.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, default=HERE / "results.json", help="where to write the rows")
    parser.add_argument("--rank-of", nargs=2, metavar=("CASE", "RANKS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        measure(options.rank_of[0], int(options.rank_of[1]))
        return 0
    print(HEADER)
    rows = []
    for ranks in options.ranks:
        for case in options.cases:
            rows.append(run_case(case, ranks))
            print(line(rows[-1]), flush=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(abs(row["plan"] / row["live"] - 1) > TOLERANCE for row in rows))


def run_case(case: str, ranks: int) -> dict:
    """One process for each rank; the last line of rank 0 is its row."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    command = [sys.executable, __file__, "--rank-of", case, str(ranks)]
    shared = {**os.environ, **MALLOC, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"{case} on {ranks} ranks failed")
    return {"case": case, "ranks": ranks, **json.loads(outputs[0].splitlines()[-1])}


def measure(case: str, ranks: int) -> None:
    """In each rank two real steps; rank 0 plans them first."""
    import torch
    import torch.distributed as dist

    from miles.learn.learner import Learner
    from miles.learn.load import load_config
    from miles.plan.counter import LiveBytes
    from miles.plan.shape import Lengths, longest_groups, new_model
    from miles.plan.simulate import simulate
    from miles.run.recipes import resolve

    recipe = resolve([], {**BASE, **CASES[case], "parallel.shard": ranks}, {})
    config = load_config(recipe.model)
    first = os.environ["RANK"] == "0"
    planned = simulate(recipe, config, recipe.learner.tokens_per_microbatch) if first else None
    if ranks > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    samples = recipe.algorithm.groups_per_step * recipe.rollout.group_size
    groups = longest_groups(Lengths.of(recipe, config), samples, recipe.rollout.group_size, config.vocab_size)
    with LiveBytes(config.vocab_size) as counter:
        learner = Learner(new_model(config), recipe)
        for _ in range(2):
            counter.forget_peaks()
            step = learner.pack(groups)
            resting, resident = sum(counter.now.values()), memory("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
            learner.update(step, learner.score(step))
            risen = memory("VmHWM") - resident
    if ranks > 1:
        dist.destroy_process_group()
    if planned is None:
        return
    live = max(sum(kinds.values()) for kinds in counter.peaks.values())
    row = {"plan": planned.peak, "live": live, "plan_rise": planned.peak - sum(planned.resting.values())}
    print(json.dumps({**row, "live_rise": live - resting, "resident_rise": risen, "phase": planned.peak_phase}))


def memory(key: str) -> int:
    """Bytes that the operating system counts for this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def line(row: dict) -> str:
    plan, live, *rise = (row[key] / MIB for key in ("plan", "live", "plan_rise", "live_rise", "resident_rise"))
    risen = f"{rise[0]:13.1f}{rise[1]:9.1f}{rise[2]:10.1f}"
    return f"{row['ranks']:<6}{row['case']:30}{plan:9.1f}{live:9.1f}{plan / live:8.3f}   {risen}"


if __name__ == "__main__":
    sys.exit(main())
