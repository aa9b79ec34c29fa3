"""What each choice of the learner is worth: switched in turn, its step's time, memory and numbers beside those of the default.

    python benchmarks/learner/ablations.py [--model NAME] [--cases CASE ...] [--out FOLDER]

A case and the one that it is compared with live at the same time, each in a process of its own, and step in turn: a ratio
compares neighbours in time. Memory is the highest resident memory during one step. Behavior log-probabilities are the model's
own with noise, so that the loss depends on what the forward computes; it is compared at the first step, on equal weights.
With --out, ablations.json there keeps the cases of earlier calls with the same settings, and ablations.svg draws all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from step import make_groups
from worker import Worker, serve

from miles.config.schema import Model, Recipe
from miles.learn.learner import Learner
from miles.learn.load import load_model
from miles.types import Group, Segment

PPO = {"algorithm": {"name": "ppo", "beta": 0.01, "value_ref": 0.1}}
LORA = {"lora": {"rank": 16}, "learner": {"learning_rate": 2e-4}}
NOISE = 0.3  # standard deviation between behavior log-probabilities and the model's own
REPEATED = ("seconds", "peak_gib")


@dataclass(frozen=True)
class Case:
    """One way to run the same step; `against` names the case that it is compared with."""

    what: str
    changes: dict[str, Any]
    against: str = "default"
    other_weights: bool = False  # it trains other weights than that one: their gradients are not compared


CASES = {
    "default": Case("GRPO, full weights, fp32", {}),
    "separate": Case("prefix sharing off", {"learner": {"prefix_sharing": "off"}}),
    "whole_head": Case(
        "chunked head off, LoRA", {**LORA, "learner": {**LORA["learner"], "head_chunk": 10**6}}, against="lora"
    ),
    "recompute": Case("gradient checkpointing on", {"learner": {"gradient_checkpointing": True}}),
    "compile": Case("compile on", {"learner": {"compile": True}}),
    "bf16": Case("bf16 forward and backward", {"learner": {"param_dtype": "bf16"}}),
    "lora": Case("LoRA rank 16 on a frozen base", LORA, other_weights=True),
    "ppo": Case("PPO, four models in full", PPO, against="ppo"),
    "ppo_roles": Case("PPO, four roles on one base", {**PPO, **LORA}, against="ppo", other_weights=True),
}


# --- one case, in a process of its own ------------------------------------------------------------------------------


def recipe_of(changes: dict[str, Any], args: argparse.Namespace) -> Recipe:
    """Old log-probabilities are those of the behavior: the loss has ratios other than 1 from the first update on."""
    correction = {"mode": "bypass"}
    tree = {
        "algorithm": {"name": "grpo", "steps": 100, "groups_per_step": args.groups, "correction": correction},
        "learner": {"learning_rate": 1e-6, "tokens_per_microbatch": args.tokens, "head_chunk": args.head_chunk},
    }
    for section, keys in changes.items():
        tree[section] = {**tree.get(section, {}), **keys}
    return Recipe.model_validate(tree)


def with_behavior(model: Any, groups: list[Group], recipe: Recipe, seed: int) -> list[Group]:
    """The same groups, sampled by a policy near the model."""
    learner = Learner(model, recipe)
    step = learner.pack(groups)
    rng = random.Random(seed)
    column = iter(learner.logprobs(step).tolist())

    def near(segment: Segment) -> Segment:
        values = (next(column) + rng.gauss(0, NOISE) if trained else 0.0 for trained in segment.loss_mask)
        return replace(segment, behavior_logprobs=tuple(values))

    return [
        replace(group, samples=tuple(replace(s, segments=tuple(map(near, s.segments))) for s in group.samples))
        for group in groups
    ]


def step_of(args: argparse.Namespace) -> Callable[[], dict[str, float]]:
    torch.set_num_threads(args.threads)
    model = load_model(Model(name=args.model), seed=args.seed)
    groups = make_groups(args, model.config.get_text_config().vocab_size)
    groups = with_behavior(model, groups, recipe_of({}, args), args.seed)
    learner = Learner(model, recipe_of(CASES[args.case].changes, args))

    def step() -> dict[str, float]:
        packed = learner.pack(groups)
        metrics = learner.update(packed, learner.score(packed))
        return {"loss": metrics["loss/policy"], "grad_norm": metrics["grad_norm"], "entropy": metrics["entropy"]}

    return step


# --- the cases beside each other ------------------------------------------------------------------------------------


def start(case: str, rest: list[str]) -> Worker:
    return Worker([str(Path(__file__).resolve()), *rest, "--case", case])


def compare(args: argparse.Namespace, rest: list[str]) -> dict[str, dict[str, Any]]:
    """Case by case; one that others are compared with stays until the last of them."""
    found: dict[str, dict[str, Any]] = {}
    cases = [name for name in CASES if name in args.cases and CASES[name].against != name]
    for against in dict.fromkeys(CASES[name].against for name in cases):
        base = start(against, rest)
        for name in [name for name in cases if CASES[name].against == against]:
            other = start(name, rest)
            pairs = [(base.step(), other.step()) for _ in range(args.rounds)]
            other.end()
            found[name] = row_of(CASES[name], base.first, other.first, pairs)
            print(table_line(name, found[name]), flush=True)
        base.end()
    return found


def row_of(case: Case, first: dict, other: dict, pairs: list[tuple[dict, dict]]) -> dict[str, Any]:
    """Medians of the rounds, the ratios of each, and how far the first step's numbers lie apart."""
    row: dict[str, Any] = {"against": case.against, "first_seconds": other["seconds"]}
    for key in REPEATED:
        row[key] = statistics.median(mine[key] for _, mine in pairs)
        row[f"{key}_against"] = statistics.median(base[key] for base, _ in pairs)
        row[f"{key}_ratios"] = [mine[key] / base[key] for base, mine in pairs]
    row["loss"], row["loss_against"] = other["loss"], first["loss"]
    row["loss_differs_by"] = abs(other["loss"] / first["loss"] - 1)
    row["entropy_differs_by"] = abs(other["entropy"] / first["entropy"] - 1)
    row["grad_norm_differs_by"] = None if case.other_weights else abs(other["grad_norm"] / first["grad_norm"] - 1)
    return row


# --- for people -----------------------------------------------------------------------------------------------------

HEADER = [
    "| case | against | step | times the time | peak memory | times the memory | loss differs by | gradient norm by |",
    "| --- | --- | --- | --- | --- | --- | --- | --- |",
]


def table(rows: dict[str, dict[str, Any]]) -> Iterable[str]:
    return [*HEADER, *(table_line(name, rows[name]) for name in CASES if name in rows)]


def table_line(name: str, row: dict[str, Any]) -> str:
    cells = [
        CASES[name].what,
        CASES[row["against"]].what,
        f"{row['seconds']:.2f} s against {row['seconds_against']:.2f}",
        _spread(row["seconds_ratios"]),
        f"{row['peak_gib']:.2f} GiB against {row['peak_gib_against']:.2f}",
        _spread(row["peak_gib_ratios"]),
        _small(row["loss_differs_by"]),
        _small(row["grad_norm_differs_by"]),
    ]
    return f"| {' | '.join(cells)} |"


def _spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _small(value: float | None) -> str:
    if value is None:
        return "-"
    return "0" if value == 0 else f"1e{math.floor(math.log10(value))}" if value < 1e-3 else f"{value:.3f}"


def plot(rows: dict[str, dict[str, Any]], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = path.name  # the same numbers, the same file
    from matplotlib import pyplot as plt

    names = [name for name in CASES if name in rows]
    figure, axes = plt.subplots(figsize=(8, 0.55 * len(names) + 1.2))
    for offset, key, label in ((-0.2, "seconds_ratios", "time of a step"), (0.2, "peak_gib_ratios", "peak memory")):
        middle = [statistics.median(rows[name][key]) for name in names]
        low = [m - min(rows[name][key]) for m, name in zip(middle, names, strict=True)]
        high = [max(rows[name][key]) - m for m, name in zip(middle, names, strict=True)]
        axes.barh([i + offset for i in range(len(names))], middle, xerr=[low, high], height=0.38, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    labels = [f"{CASES[name].what}\n/ {CASES[rows[name]['against']].what}" for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("ratio; the line at its end: from the lowest round to the highest")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4")
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=48, help="tokens of a prompt, the system prompt included")
    parser.add_argument("--system", type=int, default=16, help="tokens that all prompts begin with")
    parser.add_argument("--answer", type=int, default=24, help="mean tokens of an answer")
    parser.add_argument("--exact", action="store_true", help="every answer has the mean length")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of one micro-batch")
    parser.add_argument("--head-chunk", type=int, default=128, help="tokens whose logits exist at the same time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--out", type=Path, help="folder for ablations.json and ablations.svg")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        serve(step_of(args))
        return
    print("\n".join(HEADER), flush=True)
    rows = compare(args, sys.argv[1:])
    if args.out:
        keep(rows, {key: value for key, value in vars(args).items() if key not in ("out", "case", "cases")}, args.out)


def keep(rows: dict[str, dict[str, Any]], settings: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "ablations.json"
    before = json.loads(file.read_text()) if file.exists() else {}
    if before.get("settings") == settings:
        rows = {**before["cases"], **rows}
    file.write_text(json.dumps({"settings": settings, "cases": rows}, indent=1) + "\n")
    plot(rows, folder / "ablations.svg")
    print("\n".join(["", *table(rows)]))


if __name__ == "__main__":
    main()
