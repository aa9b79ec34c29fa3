"""What each choice of the learner is worth: switched in turn, its step's time, memory and numbers beside the default's.

    python benchmarks/learner/ablations.py [--model NAME] [--out FOLDER]

Every case runs in a process of its own, in turn, several rounds; ratios compare the best of each. Writes ablations.json,
ablations.md and ablations.png (where matplotlib is installed) to the folder.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from step import make_groups

from miles.config.schema import Model, Recipe
from miles.learn.learner import Learner
from miles.learn.load import load_model

PPO = {"algorithm": {"name": "ppo", "beta": 0.01}}
LORA = {"lora": {"rank": 16}, "learner": {"learning_rate": 2e-4}}


@dataclass(frozen=True)
class Case:
    """One way to run the same step; `against` names the case that it is compared with."""

    what: str
    changes: dict[str, Any]
    against: str = "default"


CASES = {
    "default": Case("GRPO, full weights, fp32, one prompt for all of its completions", {}),
    "separate": Case("prefix sharing off", {"learner": {"prefix_sharing": "off"}}),
    "whole_head": Case("head in one piece (chunks off)", {"learner": {"head_chunk": 10**6}}),
    "recompute": Case("gradient checkpointing on", {"learner": {"gradient_checkpointing": True}}),
    "compile": Case("torch.compile on", {"learner": {"compile": True}}),
    "bf16": Case("bf16 forward and backward", {"learner": {"param_dtype": "bf16"}}),
    "lora": Case("LoRA rank 16 on a frozen base", LORA),
    "ppo": Case("PPO, four models in full", PPO),
    "ppo_roles": Case("PPO, four roles on one base (LoRA rank 16)", {**PPO, **LORA}, against="ppo"),
}


def recipe_of(changes: dict[str, Any], args: argparse.Namespace) -> Recipe:
    tree = {
        "algorithm": {"name": "grpo", "steps": 100, "scale_std": False, "groups_per_step": args.groups},
        "learner": {"learning_rate": 1e-5, "tokens_per_microbatch": args.tokens},
    }
    for section, keys in changes.items():
        tree[section] = {**tree.get(section, {}), **keys}
    return Recipe.model_validate(tree)


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Steps of one case in this process: the first one's numbers, the best time of the later ones, peak memory."""
    torch.set_num_threads(args.threads)
    model = load_model(Model(name=args.model), seed=args.seed)
    groups = make_groups(args, model.config.get_text_config().vocab_size)
    learner = Learner(model, recipe_of(CASES[args.case].changes, args))
    first, seconds = {}, []
    for _ in range(1 + args.steps):
        start = time.perf_counter()
        step = learner.pack(groups)
        metrics = learner.update(step, learner.score(step))
        seconds.append(time.perf_counter() - start)
        first = first or metrics
    return {
        "seconds": min(seconds[1:]),
        "first_seconds": seconds[0],
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "loss": first["loss/policy"],
        "grad_norm": first["grad_norm"],
        "entropy": first["entropy"],
    }


def compare(args: argparse.Namespace, rest: list[str]) -> dict[str, dict[str, float]]:
    found: dict[str, list[dict[str, float]]] = {name: [] for name in args.cases}
    for _ in range(args.rounds):
        for name in args.cases:
            command = [sys.executable, str(Path(__file__).resolve()), *rest, "--case", name]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[name].append(json.loads(out.splitlines()[-1]))
            print(f"{name}: {found[name][-1]['seconds']:.2f} s, {found[name][-1]['peak_gib']:.2f} GiB", flush=True)
    best = {}
    for name, rounds in found.items():
        best[name] = {key: min(one[key] for one in rounds) for key in rounds[0]}
        times = [one["seconds"] for one in rounds]
        best[name]["spread"] = max(times) / min(times) - 1
    for name, row in best.items():
        base = best.get(CASES[name].against, row)
        row["times_the_seconds"] = row["seconds"] / base["seconds"]
        row["times_the_memory"] = row["peak_gib"] / base["peak_gib"]
        row["entropy_differs_by"] = abs(row["entropy"] - base["entropy"]) / abs(base["entropy"])
        row["grad_norm_differs_by"] = abs(row["grad_norm"] - base["grad_norm"]) / abs(base["grad_norm"])
    return best


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = [
        "| case | against | time | memory | entropy differs by | gradient norm differs by |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in rows.items():
        other = CASES[name].against
        lines.append(
            f"| {CASES[name].what} | {'' if other == name else CASES[other].what.split(',')[0]} | {row['seconds']:.2f} s, "
            f"{row['times_the_seconds']:.2f}x | {row['peak_gib']:.2f} GiB, {row['times_the_memory']:.2f}x | "
            f"{_small(row['entropy_differs_by'])} | {_small(row['grad_norm_differs_by'])} |"
        )
    return "\n".join(lines) + "\n"


def _small(value: float) -> str:
    return "0" if value == 0 else f"1e{math.floor(math.log10(value))}" if value < 1e-3 else f"{value:.3f}"


def plot(rows: dict[str, dict[str, float]], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    names = [name for name in rows if CASES[name].against != name]
    figure, axes = plt.subplots(figsize=(8, 0.5 * len(names) + 1.2))
    for offset, key, label in ((-0.2, "times_the_seconds", "time of a step"), (0.2, "times_the_memory", "peak memory")):
        axes.barh(
            [i + offset for i in range(len(names))], [rows[name][key] for name in names], height=0.38, label=label
        )
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), [CASES[name].what for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("times that of the case it is compared with")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt, the system prompt included")
    parser.add_argument("--system", type=int, default=20, help="tokens that all prompts begin with")
    parser.add_argument("--answer", type=int, default=32, help="mean tokens of an answer")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of one micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed steps of one process, after one that is not")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="folder for ablations.json, .md and .png")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args)))
        return
    rows = compare(args, sys.argv[1:])
    print(table(rows))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "ablations.json").write_text(
            json.dumps({"settings": _settings(args), "cases": rows}, indent=1) + "\n"
        )
        (args.out / "ablations.md").write_text(table(rows))
        plot(rows, args.out / "ablations.png")


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(args).items() if key not in ("out", "case", "cases")}


if __name__ == "__main__":
    main()
