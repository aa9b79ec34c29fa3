"""Miles against TRL on one machine: the same task, model, data and hyper-parameters, in turn, several times.

    make bench-trl        # makes the two virtual environments of TRL beside this file, then runs this

Writes results.json and results.png beside itself and prints the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from miles.run.threads import SPINS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAMPLES_PER_STEP = 64
COMMON = ["--eval.rows", "0", "--run.checkpoint_every", "none", "--log.live", "off"]


def prepare(folder: Path) -> tuple[str, Path]:
    """The model's plain folder and the training rows as chat messages, for the other side."""
    from miles.env.tasks import find
    from miles.learn.cache import smollm2_folder

    task = find("task:addition")
    rows = folder / "rows.jsonl"
    chats = [
        {
            "messages": [
                {"role": "system", "content": task.system_prompt},
                {"role": "user", "content": row["prompt"]},
            ],
            "answer": int(row["answer"]),
        }
        for row in task.rows(seed=0).train
    ]
    rows.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return str(smollm2_folder()), rows


def run_trl(side: str, python: Path, model: str, rows: Path, steps: int, seed: int, folder: Path) -> dict:
    out = folder / f"trl_{side}_{seed}.json"
    command = [python, HERE / f"trl_{side}.py", "--model", model, "--rows", rows, "--steps", steps, "--seed", seed]
    execute([*map(str, command), "--out", str(out)])
    return json.loads(out.read_text())


def run_miles(side: str, steps: int, seed: int, folder: Path) -> dict:
    recipe = {"grpo": "recipes/quickstart.toml", "ppo": "recipes/ppo_arithmetic.toml"}[side]
    run_dir = folder / f"miles_{side}_{seed}"
    args = ["--algorithm.steps", str(steps), "--run.seed", str(seed)]
    execute([sys.executable, "-m", "miles", "train", recipe, "--run", str(run_dir), *COMMON, *args])
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    ends, total = [], 0.0
    for row in rows:
        total += row["time/step_s"]
        ends.append(total)
    peak = max(row["memory/peak_bytes"] for row in rows)
    return {"step_ends_s": ends, "reward": [row["reward/mean"] for row in rows], "peak_bytes": peak}


def execute(command: list[str]) -> None:
    """Both sides wait for threads alike, in the way that is best for either: see miles/run/threads.py."""
    print("$", " ".join(Path(part).name if os.sep in part else part for part in command), flush=True)
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GOMP_SPINCOUNT": SPINS}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command[1]} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def summary(result: dict) -> dict[str, float | None]:
    ends, rewards = result["step_ends_s"], result["reward"]
    reached = [end for end, reward in zip(ends, rewards, strict=False) if reward >= 0.8]
    return {
        "samples_per_s": SAMPLES_PER_STEP * len(ends) / ends[-1],
        "seconds_to_reward_0.8": reached[0] if reached else None,
        "peak_gib": result["peak_bytes"] / 2**30,
        "mean_reward": statistics.fmean(rewards),
        "last_reward": statistics.fmean(rewards[-3:]),
    }


def ratios(miles: list[dict], trl: list[dict]) -> dict[str, object]:
    """Ratios of runs that stood side by side; spread = smallest and largest."""
    pairs = [(summary(m), summary(t)) for m, t in zip(miles, trl, strict=True)]
    speed = [m["samples_per_s"] / t["samples_per_s"] for m, t in pairs]
    memory = [m["peak_gib"] / t["peak_gib"] for m, t in pairs]
    return {
        "speed": statistics.median(speed), "speed_spread": [min(speed), max(speed)],
        "memory": statistics.median(memory), "memory_spread": [min(memory), max(memory)],
        "miles": [m for m, _ in pairs], "trl": [t for _, t in pairs],
    }  # fmt: skip


def draw(results: dict, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sides = [side for side in ("grpo", "ppo") if side in results]
    figure, axes = pyplot.subplots(2, len(sides), figsize=(6 * len(sides), 7), squeeze=False)
    for column, side in enumerate(sides):
        for name, colour in (("miles", "tab:blue"), ("trl", "tab:orange")):
            for number, result in enumerate(results[side]["runs"][name]):
                label = name.replace("miles", "Miles").replace("trl", "TRL") if number == 0 else None
                axes[0][column].plot(result["reward"], color=colour, alpha=0.7, label=label)
                axes[1][column].plot(result["step_ends_s"], result["reward"], color=colour, alpha=0.7, label=label)
        axes[0][column].set(title=f"{side}: reward per step", xlabel="step", ylabel="mean reward", ylim=(-0.02, 1.02))
        axes[1][column].set(
            title=f"{side}: reward over time", xlabel="seconds of training", ylabel="mean reward", ylim=(-0.02, 1.02)
        )
        for axis in axes[:, column]:
            axis.grid(alpha=0.3)
            axis.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grpo-python", type=Path, default=HERE / ".venv-grpo" / "bin" / "python")
    parser.add_argument("--ppo-python", type=Path, default=HERE / ".venv-ppo" / "bin" / "python")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--grpo-steps", type=int, default=12)
    parser.add_argument("--ppo-steps", type=int, default=6)
    parser.add_argument("--sides", nargs="+", default=["grpo", "ppo"], choices=["grpo", "ppo"])
    parser.add_argument("--out", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    results: dict[str, object] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, rows = prepare(folder)
        for side in args.sides:
            python, steps = (args.grpo_python, args.grpo_steps) if side == "grpo" else (args.ppo_python, args.ppo_steps)
            runs: dict[str, list[dict]] = {"miles": [], "trl": []}
            for seed in range(args.repeats):
                runs["miles"].append(run_miles(side, steps, seed, folder))
                runs["trl"].append(run_trl(side, python, model, rows, steps, seed, folder))
            results[side] = {**ratios(runs["miles"], runs["trl"]), "runs": runs}
            shown = {k: v for k, v in results[side].items() if k != "runs"}
            print(json.dumps({side: shown}, indent=1), flush=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
