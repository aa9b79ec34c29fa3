"""How much of the machine's own fp32 matrix-product rate a learner's step reaches, and what a shared prompt saves.

    python benchmarks/learner/rate.py [--model NAME] [--json FILE]

Counts useful operations only: products of the blocks, causal attention, the head on the states that are read, three times
for forward and backward. Recomputed logits, padding, norms and the optimizer count as time and as no operations. The rate of
the machine is a square product of 2048, by PyTorch (`torch.mm`) and by the library that Miles chooses, measured before and
after the steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from step import make_groups

from miles.config.schema import Model, Recipe
from miles.kernels.products import linear
from miles.learn.learner import Learner
from miles.learn.load import load_model
from miles.types import Group


def machine_rate(size: int = 2048, repeats: int = 5) -> dict[str, float]:
    """Operations a second of a square fp32 product, best of `repeats`."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    out = {}
    for name, multiply in (("torch.mm", torch.mm), ("chosen library", linear)):
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


def step_seconds(model: Any, groups: list[Group], args: argparse.Namespace, sharing: str) -> float:
    recipe = Recipe.model_validate(
        {
            "algorithm": {"name": "dr_grpo", "steps": 100, "groups_per_step": args.groups},
            "learner": {
                "learning_rate": 1e-6,
                "tokens_per_microbatch": args.tokens,
                "prefix_sharing": sharing,
            },
        }
    )
    learner = Learner(model, recipe)

    def step() -> None:
        batches = learner.pack(groups)
        learner.update(batches, learner.score(batches))

    step()
    return min(_seconds(step) for _ in range(args.steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4")
    parser.add_argument("--groups", type=int, default=1)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=256, help="mean tokens of an answer")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of one micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.seed, args.system = 0, args.prompt
    torch.set_num_threads(args.threads)
    model = load_model(Model(name=args.model), seed=0)
    groups = make_groups(args, model.config.get_text_config().vocab_size)
    before = machine_rate()
    separate = step_seconds(model, groups, args, "off")
    shared = step_seconds(model, groups, args, "auto")
    after = machine_rate()
    machine = {name: statistics.fmean((before[name], after[name])) for name in before}
    rate = useful_operations(model, groups) / separate
    result = {
        "step_operations_per_s": rate,
        "machine_operations_per_s": machine,
        "part_of_torch_mm": rate / machine["torch.mm"],
        "part_of_chosen_library": rate / machine["chosen library"],
        "shared_step_over_separate": shared / separate,
        "mean_row_tokens": statistics.fmean(len(s.segments[0].token_ids) for g in groups for s in g.samples),
    }
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
