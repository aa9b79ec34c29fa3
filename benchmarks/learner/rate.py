"""How much of the machine's own fp32 matrix-product rate a learner's step reaches, and what a shared prompt saves.

    python benchmarks/learner/rate.py [--model NAME] [--json FILE]

Counts useful operations only: products of the blocks, causal attention, the head on the states that are read, three times
for forward and backward. Recomputed logits, padding, norms and the optimizer count as time and as no operations. The rate of
the machine is a square product of 2048, by PyTorch (`torch.mm`) and by the library that Miles chooses, measured before each
step; the best of each counts. Beside it stands the same step in plain transformers (`step.plain_step`).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import make_groups, plain_model, plain_step
from worker import SETTINGS, Worker, serve

from miles.config.schema import Model, Recipe
from miles.kernels.products import linear
from miles.learn.learner import Learner
from miles.learn.load import load_model
from miles.types import Group

RATE = 1e-6
SHARING = {"separate": "off", "shared": "auto"}
SIDES = (*SHARING, "plain")
MULTIPLY = {"torch.mm": torch.mm, "chosen library": linear}


def machine_rate(size: int = 2048, repeats: int = 5) -> dict[str, float]:
    """Operations a second of a square fp32 product, best of `repeats`."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = {}
    for name, multiply in MULTIPLY.items():
        best = min(_seconds(lambda multiply=multiply: multiply(a, b)) for _ in range(repeats))
        out[name] = 2 * size**3 / best
    return out


def _seconds(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def useful_operations(model: Any, groups: list[Group]) -> float:
    """Of one forward and backward over these samples, each in a row of its own."""
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weights = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2)
    forward = 0.0
    for sample in (sample for group in groups for sample in group.samples):
        (segment,) = sample.segments
        tokens = len(segment.token_ids) - 1  # the last token is a label only
        forward += 2 * weights * tokens
        forward += 2 * config.num_hidden_layers * config.num_attention_heads * head * tokens * (tokens + 1)
        forward += 2 * config.vocab_size * config.hidden_size * segment.num_trained
    return 3 * forward


def miles_step(model: Any, groups: list[Group], args: argparse.Namespace, sharing: str) -> Callable[[], Any]:
    recipe = Recipe.model_validate(
        {
            "algorithm": {"name": "dapo", "steps": 100, "scale_std": False, "groups_per_step": args.groups},
            "learner": {"learning_rate": RATE, "tokens_per_microbatch": args.tokens, "prefix_sharing": sharing},
        }
    )
    learner = Learner(model, recipe)

    def step() -> None:
        batches = learner.pack(groups)
        learner.update(batches, learner.score(batches))

    return step


def serve_side(args: argparse.Namespace) -> None:
    """In the process of a side; with the first step comes how many useful operations it has."""
    torch.set_num_threads(args.threads)
    section = Model(name=args.model)
    model = plain_model(section) if args.side == "plain" else load_model(section, seed=0)
    groups = make_groups(args, model.config.get_text_config().vocab_size)
    if args.side == "plain":
        step = plain_step(model, groups, args.tokens)
    else:
        step = miles_step(model, groups, args, SHARING[args.side])
    operations = useful_operations(model, groups)

    def numbered() -> dict[str, float]:
        step()
        return {"useful_operations": operations}

    serve(numbered)


def compare(args: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    """The machine and the sides in turn, `rounds` times."""
    torch.set_num_threads(args.threads)
    command = [str(Path(__file__).resolve()), *rest, "--side"]
    workers = {side: Worker([*command, side], {} if side == "plain" else SETTINGS) for side in args.sides}
    seconds: dict[str, list[float]] = {side: [] for side in args.sides}
    machine: dict[str, list[float]] = {library: [] for library in MULTIPLY}
    for _ in range(args.rounds):
        for side, worker in workers.items():
            for library, rate in machine_rate().items():
                machine[library].append(rate)
            seconds[side].append(worker.step()["seconds"])
    operations = workers["separate"].first["useful_operations"]
    for worker in workers.values():
        worker.end()
    best = {side: min(times) for side, times in seconds.items()}
    result = {
        "row_tokens": args.prompt + args.answer - 1,
        "useful_operations": operations,
        "seconds": seconds,
        "machine_operations_per_s": machine,
        "part_of_torch_mm": operations / best["separate"] / max(machine["torch.mm"]),
        "part_of_chosen_library": operations / best["separate"] / max(machine["chosen library"]),
    }
    ratios = {"plain": "plain_over_separate", "shared": "shared_over_separate"}
    return result | {ratios[side]: best[side] / best["separate"] for side in ratios if side in best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=264, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=1100, help="tokens of one micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", type=int, default=264, help="tokens of every answer")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="separate is always one of them")
    parser.add_argument("--json", type=Path, help="where to write the result, too")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seed, args.exact, args.system = 0, True, args.prompt
    args.sides = [side for side in SIDES if side in ("separate", *args.sides)]
    if args.side:
        serve_side(args)
        return
    text = json.dumps(compare(args, sys.argv[1:]), indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
