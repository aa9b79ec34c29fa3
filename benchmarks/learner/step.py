"""A learner's step against the same step written with plain transformers: time and peak memory, as ratios within one run.

    python benchmarks/learner/step.py [--model NAME] [--json FILE]

Three sides take turns, each in a process of its own: Miles with prefix sharing, Miles without it, and plain transformers
(one padded row a sample, full logits, log-softmax, autograd, AdamW). Groups are made up: prompts that begin with one system
prompt, short answers of random length, half of them rewarded. All rewards differ within their group, so nobody gains from
leaving out samples without advantage.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from miles.config.schema import Model, Recipe
from miles.learn.learner import Learner
from miles.learn.load import load_model
from miles.learn.locate import locate
from miles.types import Group, Sample, Segment

SIDES = ("sharing", "separate", "plain")
RATE = 1e-5


def make_groups(args: argparse.Namespace, symbols: int) -> list[Group]:
    rng = random.Random(args.seed)
    system = [rng.randrange(10, symbols) for _ in range(args.system)]

    def sample(prompt: list[int], reward: float) -> Sample:
        length = args.answer if args.exact else rng.randint(1, 2 * args.answer - 1)
        answer = [rng.randrange(10, min(symbols, 1000)) for _ in range(length)]
        count = len(answer)
        return Sample(
            (
                Segment(
                    (*prompt, *answer),
                    (False,) * len(prompt) + (True,) * count,
                    (0.0,) * len(prompt) + (-1.0,) * count,
                    (-1,) * len(prompt) + (0,) * count,
                ),
            ),
            "stop",
            "",
            reward,
        )

    groups = []
    for ordinal in range(args.groups):
        prompt = system + [rng.randrange(10, symbols) for _ in range(args.prompt - args.system)]
        samples = tuple(sample(prompt, float(i % 2)) for i in range(args.samples))
        groups.append(Group(ordinal, ordinal, samples))
    return groups


def recipe_of(args: argparse.Namespace, side: str) -> Recipe:
    return Recipe.model_validate(
        {
            "algorithm": {"name": "dapo", "steps": 100, "scale_std": False, "groups_per_step": args.groups},
            "learner": {
                "learning_rate": RATE,
                "tokens_per_microbatch": args.tokens,
                "prefix_sharing": "auto" if side == "sharing" else "off",
            },
        }
    )


def miles_step(model: torch.nn.Module, groups: list[Group], recipe: Recipe) -> Callable[[], float]:
    learner = Learner(model, recipe)

    def step() -> float:
        batches = learner.pack(groups)
        return learner.update(batches, learner.score(batches))["grad_norm"]

    return step


def plain_step(model: torch.nn.Module, groups: list[Group], tokens: int) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    samples = [(sample, group) for group in groups for sample in group.samples]
    width = max(len(sample.segments[0].token_ids) for sample, _ in samples)
    count = sum(sample.num_trained for sample, _ in samples)
    rows = max(1, tokens // width)

    def batch_loss(part: list[tuple[Sample, Group]]) -> torch.Tensor:
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        mask = torch.zeros(len(part), width, dtype=torch.bool)
        shown = torch.zeros(len(part), width, dtype=torch.int64)
        advantage = torch.zeros(len(part), 1)
        for i, (sample, group) in enumerate(part):
            segment = sample.segments[0]
            n = len(segment.token_ids)
            ids[i, :n], mask[i, :n], shown[i, :n] = torch.tensor(segment.token_ids), torch.tensor(segment.loss_mask), 1
            advantage[i] = sample.reward - statistics.fmean(s.reward for s in group.samples)
        logits = model(input_ids=ids, attention_mask=shown, use_cache=False).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, 1:, None]).squeeze(2)
        ratio = torch.exp(logprobs - logprobs.detach())
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
        return (loss * mask[:, 1:]).sum() / count

    def step() -> float:
        for start in range(0, len(samples), rows):
            batch_loss(samples[start : start + rows]).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return norm.item()

    return step


def plain_model(section: Model) -> torch.nn.Module:
    """The model as transformers loads it, without anything of Miles."""
    source = locate(section)
    return AutoModelForCausalLM.from_pretrained(source.place, dtype=torch.float32, **source.arguments(section)).eval()


def measure(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(args.threads)
    section = Model(name=args.model)
    model = plain_model(section) if args.side == "plain" else load_model(section, seed=args.seed)
    groups = make_groups(args, model.config.get_text_config().vocab_size)
    if args.side == "plain":
        step = plain_step(model, groups, args.tokens)
    else:
        step = miles_step(model, groups, recipe_of(args, args.side))
    first, seconds, busy = step(), [], []
    for _ in range(args.steps):
        start, start_busy = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - start_busy)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "seconds": min(seconds),
        "cpu_seconds": min(busy),
        "peak_gib": peak / 2**30,
        "first_grad_norm": first,
    }


def compare(args: argparse.Namespace, rest: list[str]) -> dict[str, object]:
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side in SIDES:
            command = [sys.executable, str(Path(__file__).resolve()), *rest, "--side", side]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found[side].append(json.loads(out.splitlines()[-1]))
    best = {side: {key: min(one[key] for one in rounds) for key in rounds[0]} for side, rounds in found.items()}
    plain = best["plain"]
    ratios = {
        side: {
            "times_as_fast": plain["seconds"] / best[side]["seconds"],
            "times_as_fast_in_cpu_seconds": plain["cpu_seconds"] / best[side]["cpu_seconds"],
            "part_of_memory": best[side]["peak_gib"] / plain["peak_gib"],
        }
        for side in ("sharing", "separate")
    }
    return {"model": args.model, "sides": best, "against_plain": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct-q4")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=35, help="tokens of a prompt, the system prompt included")
    parser.add_argument("--system", type=int, default=20, help="tokens that all prompts begin with")
    parser.add_argument("--answer", type=int, default=4, help="mean tokens of an answer")
    parser.add_argument("--exact", action="store_true", help="every answer has the mean length")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of one micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of one process, after one that is not")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="where to write the result, too")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(measure(args)))
        return
    result = compare(args, sys.argv[1:])
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
