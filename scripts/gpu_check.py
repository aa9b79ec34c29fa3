"""Does the learner give a GPU's numbers that are a CPU's, and how fast, in how much memory?

    scripts/gpu_check.sh [--out gpu_check.json] [--small] [--device cuda]

A random model of about 300 million parameters makes one step of the same groups on the CPU in fp32 and in each mode on the
device; loss, entropy and gradient norm must agree. Then each mode is timed on a larger step: tokens/s, the part of the
device's bf16 peak that useful operations reach (MFU), and peak memory beside `miles plan`'s. Ends with 1 where a number is off.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from miles.config.schema import Recipe
from miles.learn.learner import Learner
from miles.types import Group, Sample, Segment

PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40": 181e12, "B200": 2250e12, "4090": 165e12}
"""Dense operations a second, as the makers state them."""

FLEX = {"learner": {"attention": "flex"}}
BF16 = {"learner": {"param_dtype": "bf16"}}
COMPILE = {"learner": {"param_dtype": "bf16", "compile": True}}
PPO_ROLES = {"algorithm": {"name": "ppo", "beta": 0.01}, "lora": {"rank": 16}}


@dataclass(frozen=True)
class Mode:
    changes: dict[str, Any]
    close: float  # how far entropy and gradient norm may be from the CPU's, relative


MODES = {
    "fp32": Mode({}, 1e-3),
    "fp32 flex attention": Mode(FLEX, 1e-3),
    "bf16": Mode(BF16, 5e-2),
    "bf16 flex attention": Mode({"learner": {**BF16["learner"], **FLEX["learner"]}}, 5e-2),
    "bf16 compiled": Mode(COMPILE, 5e-2),
    "bf16 recomputed": Mode({"learner": {"param_dtype": "bf16", "gradient_checkpointing": True}}, 5e-2),
    "fp32 ppo, four roles on one base": Mode(PPO_ROLES, 1e-3),
    "bf16 ppo, four roles on one base": Mode({**PPO_ROLES, **BF16}, 5e-2),
}


def model_of(small: bool) -> LlamaForCausalLM:
    size = (
        {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
        if small
        else {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "num_attention_heads": 16, "vocab_size": 32768}
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        **size,
        num_key_value_heads=size["num_attention_heads"] // 2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval()


def make_groups(count: int, samples: int, prompt: int, answer: int, symbols: int) -> list[Group]:
    rng = random.Random(0)
    ids = lambda n: [rng.randrange(symbols) for _ in range(n)]  # noqa: E731
    groups = []
    for ordinal in range(count):
        shared, made = ids(prompt), []
        for i in range(samples):
            n = rng.randint(answer // 2, answer)
            segment = Segment(
                (*shared, *ids(n)),
                (False,) * prompt + (True,) * n,
                (0.0,) * prompt + (-3.0,) * n,
                (-1,) * prompt + (0,) * n,
            )
            made.append(Sample((segment,), "stop", "", float(i % 2)))
        groups.append(Group(ordinal, ordinal, tuple(made)))
    return groups


def recipe_of(changes: dict[str, Any], groups: list[Group], tokens: int) -> Recipe:
    tree = {
        "algorithm": {"name": "grpo", "steps": 100, "groups_per_step": len(groups)},
        "rollout": {"group_size": len(groups[0].samples)},
        "learner": {"learning_rate": 1e-5, "tokens_per_microbatch": tokens, "eps": 1e-3},
    }
    for section, keys in changes.items():
        tree[section] = {**tree.get(section, {}), **keys}
    return Recipe.model_validate(tree)


def step(learner: Learner, groups: list[Group]) -> dict[str, float]:
    packed = learner.pack(groups)
    return learner.update(packed, learner.score(packed))


def numbers(changes: dict[str, Any], groups: list[Group], device: str, small: bool) -> dict[str, float]:
    learner = Learner(model_of(small), recipe_of(changes, groups, 2048), device=device)
    row = step(learner, groups)
    return {key: row[key] for key in ("loss/policy", "entropy", "grad_norm")}


def speed(changes: dict[str, Any], groups: list[Group], device: str, small: bool, steps: int) -> dict[str, float]:
    """Median step after two that warm up; useful operations a second; peak memory of the device."""
    learner = Learner(model_of(small), recipe_of(changes, groups, 16384), device=device)
    cuda = device != "cpu"
    for _ in range(2):
        step(learner, groups)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step(learner, groups)
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    took = statistics.median(seconds)
    tokens = sum(len(segment.token_ids) for group in groups for s in group.samples for segment in s.segments)
    return {
        "step_s": took,
        "tokens_per_s": tokens / took,
        "useful_operations_per_s": useful_operations(learner.model, groups) / took,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0,
    }


def useful_operations(model: Any, groups: list[Group]) -> float:
    """Of one forward and backward of the policy, every prompt counted once for its completions."""
    config = model.config
    weights = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2)
    total = 0.0
    for group in groups:
        segments = [sample.segments[0] for sample in group.samples]
        prompt = len(segments[0].token_ids) - segments[0].num_trained
        tokens = prompt + sum(segment.num_trained for segment in segments)
        pairs = prompt**2 / 2 + sum(s.num_trained * (prompt + s.num_trained / 2) for s in segments)
        total += 6 * weights * tokens + 12 * config.num_hidden_layers * config.hidden_size * pairs
        total += 6 * config.vocab_size * config.hidden_size * (tokens - prompt)
    return total


def check(args: argparse.Namespace) -> dict[str, Any]:
    cpu = args.device == "cpu"
    modes = {n: m for n, m in MODES.items() if not (cpu and ("flex" in n or "compiled" in n))}
    symbols = model_of(args.small).config.vocab_size
    few, many = (
        make_groups(2, 4, 32, 32, symbols),
        make_groups(*((2, 4, 32, 32) if args.small else (8, 8, 512, 512)), symbols),
    )
    reference: dict[str, dict[str, float]] = {}
    rows = {}
    for name, mode in modes.items():
        kind = "ppo" if "ppo" in name else "grpo"
        if kind not in reference:
            reference[kind] = numbers(PPO_ROLES if kind == "ppo" else {}, few, "cpu", args.small)
        rows[name] = _row(mode, few, many, reference[kind], args)
        print(name, json.dumps(rows[name]), flush=True)
        gc.collect()
        if not cpu:
            torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name() if not cpu else "cpu", "torch": torch.__version__, "modes": rows}


def _row(
    mode: Mode, few: list[Group], many: list[Group], expected: dict[str, float], args: argparse.Namespace
) -> dict[str, Any]:
    try:
        found = numbers(mode.changes, few, args.device, args.small)
        # The loss itself is near 0 by construction, so it is compared by size, not by ratio.
        away = {
            key: abs(found[key] - expected[key]) / max(abs(expected[key]), 1.0 if key == "loss/policy" else 1e-6)
            for key in expected
        }
        row: dict[str, Any] = {"differs_by": away, "equal": all(value <= mode.close for value in away.values())}
        row |= speed(mode.changes, many, args.device, args.small, args.steps)
        peak = next(
            (
                value
                for name, value in PEAK_BF16.items()
                if args.device != "cpu" and name in torch.cuda.get_device_name()
            ),
            None,
        )
        if peak is not None:
            row["mfu"] = row["useful_operations_per_s"] / peak
        return row
    except Exception as error:  # a mode that cannot run is a finding, and the others still count
        return {"equal": False, "error": f"{type(error).__name__}: {error}"[:2000]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: tries the script itself")
    parser.add_argument("--small", action="store_true", help="a tiny model and step")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each mode")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("this machine has no usable GPU; --device cpu --small tries the script itself", file=sys.stderr)
        return 2
    result = check(args)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    wrong = [name for name, row in result["modes"].items() if not row["equal"]]
    print(f"{len(result['modes']) - len(wrong)} of {len(result['modes'])} modes agree with the CPU; {args.out}")
    for name in wrong:
        print(f"differs: {name}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
