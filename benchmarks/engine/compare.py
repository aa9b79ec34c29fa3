"""Tokens per second of the in-process engine beside transformers' `generate`: same model, prompts and lengths.

    python benchmarks/engine/compare.py MODEL [--new 8 64] [--repeats 5] [--threads 2] [--json FILE]

Every contestant runs once in each round, so that a busy machine slows all of them alike; ratios are taken within a
round. Nothing ends early, so all of them make prompts * samples * new tokens. The engine also returns the log-prob of
each token, which `generate` is not asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from miles.config.schema import Model as ModelSection
from miles.engine.inprocess import InProcessEngine
from miles.learn.load import load_model, load_tokenizer
from miles.learn.locate import locate
from miles.types import Sampling

SYSTEM = "You are a helpful calculator. You answer with a single number and nothing else."


def chat_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Chat prompts of about 35 tokens, of more than one length."""
    prompts = []
    for i in range(count):
        question = f"{i + 1} + {2 * i + 3} =" if i % 2 else f"What is {i + 1} + {2 * i + 3}?"
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        prompts.append(tokenizer(text, add_special_tokens=False)["input_ids"])
    return prompts


def plain_model(section: ModelSection) -> Any:
    """The model as transformers loads it, without anything of Miles."""
    source = locate(section)
    return AutoModelForCausalLM.from_pretrained(source.place, dtype=torch.float32, **source.arguments(section)).eval()


class Generate:
    """`model.generate` on the left-padded prompts, each repeated for its samples."""

    def __init__(self, model: Any, prompts: Sequence[Sequence[int]], samples: int) -> None:
        longest = max(map(len, prompts))
        self._ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
        self._mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        self._model, self._samples = model, samples

    def __call__(self, new: int) -> None:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new,
            num_return_sequences=self._samples,
            pad_token_id=0,
        )
        out = self._model.generate(self._ids, attention_mask=self._mask, generation_config=config)
        assert out.shape[1] - self._ids.shape[1] == new, "generate stopped early"


class Engine:
    """One `generate` call of the engine for each prompt, all at once."""

    def __init__(
        self, model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], samples: int, deterministic: bool
    ) -> None:
        self._prompts, self._samples = prompts, samples
        self._engine = InProcessEngine(
            model,
            tokenizer,
            version=lambda: 0,
            end_token_ids=(),
            max_batch=len(prompts) * samples,
            deterministic=deterministic,
        )

    def __call__(self, new: int) -> None:
        asyncio.run(self._all(new))
        assert self._engine.slow_reason is None, self._engine.slow_reason

    async def _all(self, new: int) -> None:
        calls = (
            self._engine.generate(ids, self._samples, Sampling(new), range(i * self._samples, (i + 1) * self._samples))
            for i, ids in enumerate(self._prompts)
        )
        for completions in await asyncio.gather(*calls):
            assert all(len(completion.token_ids) == new for completion in completions)


def measure(contestants: dict[str, Callable[[int], None]], new: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round, after one round that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run(2)
    for _ in range(repeats):
        for name, run in contestants.items():
            start = time.perf_counter()
            run(new)
            seconds[name].append(time.perf_counter() - start)
    return seconds


def summary(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Tokens/s and, within each round, the ratio to `generate`: median, least and greatest."""
    rows = {}
    for name, times in seconds.items():
        speeds = [tokens / t for t in times]
        ratios = [g / t for g, t in zip(seconds["generate"], times, strict=True)]
        rows[name] = {
            "tokens_per_s": round(statistics.median(speeds), 1),
            "tokens_per_s_range": [round(min(speeds), 1), round(max(speeds), 1)],
            "ratio": round(statistics.median(ratios), 2),
            "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
        }
    pairs = zip(seconds["engine, deterministic"], seconds["engine, not deterministic"], strict=True)
    price = statistics.median(a / b for a, b in pairs)
    return {"contestants": rows, "price_of_determinism": round(price, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a name as in model.name, with a chat template")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    section = ModelSection(name=args.model)
    tokenizer = load_tokenizer(section)
    model = load_model(section, seed=0)
    plain = plain_model(section)
    plain.generation_config.eos_token_id = None
    prompts = chat_prompts(tokenizer, args.prompts)
    contestants: dict[str, Callable[[int], None]] = {
        "generate": Generate(plain, prompts, args.samples),
        "engine, deterministic": Engine(model, tokenizer, prompts, args.samples, deterministic=True),
        "engine, not deterministic": Engine(model, tokenizer, prompts, args.samples, deterministic=False),
    }
    result: dict[str, Any] = {
        "model": Path(args.model).name,
        "prompts": args.prompts,
        "samples": args.samples,
        "prompt_tokens": [len(prompt) for prompt in prompts],
        "threads": args.threads,
        "repeats": args.repeats,
        "new_tokens": {},
    }
    for new in args.new:
        seconds = measure(contestants, new, args.repeats)
        rows = summary(seconds, args.prompts * args.samples * new)
        result["new_tokens"][str(new)] = rows
        print(f"\n{new} new tokens, {args.prompts} prompts x {args.samples} samples, {args.threads} threads, float32")
        for name, row in rows["contestants"].items():
            low, high = row["ratio_range"]
            print(f"  {name:26s} {row['tokens_per_s']:8.1f} tokens/s   {row['ratio']:.2f}x ({low:.2f} to {high:.2f})")
        print(f"  time with determinism on / off: {rows['price_of_determinism']:.3f}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
