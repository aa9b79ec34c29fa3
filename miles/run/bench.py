"""`miles bench engine`: from how many tokens a step on vLLM is faster than sampling in process, on this machine."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from miles.config.schema import Recipe
from miles.engine.inprocess import InProcessEngine
from miles.errors import BadInput
from miles.learn.learner import Learner
from miles.learn.load import context_length, load_model
from miles.protocols import Engine
from miles.run.crossover import Point, cache_file, crossover, kind_of, write
from miles.run.local import device_of, total_steps
from miles.run.logs import said
from miles.run.prepare import Inputs, prepare
from miles.run.recipes import inspect
from miles.run.vllm import open_vllm
from miles.types import Sampling

ROUNDS = 2  # of each point, and the fastest counts: whatever else the machine does only makes a round slower
EXAMPLE = "8x16,64x16,64x64"
QUICKSTART: Mapping[str, Any] = {
    "model.name": "smollm2-135m-instruct-q4", "data.source": "task:addition", "algorithm.steps": 1, "engine.context": 256,
    "rollout.max_new_tokens": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What `miles bench engine` is told beside the recipe."""

    points: str  # SAMPLESxTOKENS,...
    to: Path | None = None  # None: the user's cache, where `engine.kind = "auto"` looks


def bench_command(
    recipes: Sequence[Path], overrides: Mapping[str, Any], options: Options, say: Callable[[str], object] = print
) -> int:
    """Measure, show and write down. Without a recipe the quickstart's model is taken."""
    given = {**({} if recipes else QUICKSTART), **overrides, "engine.kind": "vllm"}
    resolved = inspect(recipes, given, os.environ)
    recipe, wanted = resolved.recipe, parse_points(options.points)
    if resolved.row.recorded:
        raise BadInput(f"{recipe.algorithm.name} samples nothing: give a recipe of another algorithm, or none")
    torch.set_num_threads(recipe.run.threads or 1)
    with said(say):
        inputs = prepare(recipe, resolved.row)
        check_points(wanted, recipe, inputs)
        points = measure(recipe, inputs, wanted, say)
    file = options.to or cache_file()
    write(file, kind_of(recipe, device_of(recipe).type), points)
    found = crossover(points)
    say(
        'vLLM was slower at the largest point: engine.kind = "auto" stays in process'
        if found is None
        else f'crossover: {found} tokens a step; engine.kind = "auto" hands over from there on'
    )
    say(f"written to {file}")
    return 0


def parse_points(text: str) -> list[tuple[int, int]]:
    """(samples, tokens) of each point. Raises BadInput."""
    parts = [re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", part.strip()) for part in text.split(",")]
    if not all(parts):
        raise BadInput(f"--points {text}: give SAMPLESxTOKENS, with commas between, such as {EXAMPLE}")
    return [(int(part[1]), int(part[2])) for part in parts if part is not None]


def check_points(points: Sequence[tuple[int, int]], recipe: Recipe, inputs: Inputs) -> None:
    """Raises BadInput for answers that the context has no room for."""
    context, longest = recipe.engine.context or context_length(inputs.config), max(tokens for _, tokens in points)
    prompt = max(map(len, prompts_of(inputs, len(inputs.train))))
    if context is not None and prompt + longest > context:
        raise BadInput(
            f"--points: {longest} tokens beside a prompt of {prompt} do not fit the context of {context}: lower them, or raise "
            "engine.context"
        )


def measure(
    recipe: Recipe, inputs: Inputs, points: Sequence[tuple[int, int]], say: Callable[[str], object]
) -> list[Point]:
    """Every point on both engines, in turns, so that what the machine does beside it hits both."""
    free = replace(inputs, sampling=replace(inputs.sampling, stop_token_ids=(), stop=()))  # answers of equal length
    model = load_model(recipe.model, seed=recipe.run.seed, device=device_of(recipe))
    learner = Learner(model, recipe, device=device_of(recipe), total_steps=total_steps(recipe, len(inputs.train)))
    here = InProcessEngine(
        model, inputs.tokenizer, version=lambda: 0, end_token_ids=(), max_batch=recipe.engine.max_batch,
        deterministic=recipe.rollout.deterministic,
    )  # fmt: skip
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="miles-bench-")))
        there, publisher = stack.enter_context(open_vllm(recipe, free, learner, folder))
        started = time.perf_counter()
        publisher.publish(learner.policy_update())
        publish_s = time.perf_counter() - started
        say(f"one publish takes {publish_s:.2f} s, which a step on vLLM needs beside sampling")
        say(f"{'samples x tokens':<20}{'in process':>12}{'vLLM':>12}   s")
        found = []
        for engine in (here, there):  # first calls measure, compile and allocate
            _seconds(engine, inputs, recipe, (2, 4))
        for point in points:
            rounds = [[_seconds(engine, inputs, recipe, point) for engine in (here, there)] for _ in range(ROUNDS)]
            inprocess_s, vllm_s = (min(times) for times in zip(*rounds, strict=True))
            found.append(Point(*point, inprocess_s, vllm_s + publish_s))
            say(f"{f'{point[0]} x {point[1]}':<20}{inprocess_s:>12.2f}{vllm_s + publish_s:>12.2f}")
        return found


def prompts_of(inputs: Inputs, count: int) -> list[tuple[int, ...]]:
    rows = [inputs.train[index % len(inputs.train)] for index in range(count)]
    return [tuple(inputs.renderer.prompt(row).ids) for row in rows]


def _seconds(engine: Engine, inputs: Inputs, recipe: Recipe, point: tuple[int, int]) -> float:
    """Of `samples` completions of exactly `tokens` tokens, in groups as the recipe makes them."""
    samples, tokens = point
    size = min(recipe.rollout.group_size, samples)
    prompts = prompts_of(inputs, -(-samples // size))
    sampling = Sampling(tokens, recipe.rollout.temperature)

    async def run() -> None:
        calls = [
            engine.generate(ids, min(size, samples - size * i), sampling, range(size * i, min(samples, size * (i + 1))))
            for i, ids in enumerate(prompts)
        ]
        await asyncio.gather(*calls)

    started = time.perf_counter()
    asyncio.run(run())
    return time.perf_counter() - started
