"""`miles check`: judges a recipe and shows what it resolves to and who would run where, without loading any model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from miles.algo import AlgorithmRow
from miles.config.schema import Recipe
from miles.config.toml import dump_toml
from miles.run.place import world_size
from miles.run.recipes import Resolved, inspect

GPU_FILES = "nvidia[0-9]*"


def check_command(recipe_paths: Sequence[Path], overrides: Mapping[str, Any]) -> int:
    """Prints the resolved tree, the world map and the warnings. Raises ConfigError with every problem at once."""
    resolved = inspect(recipe_paths, overrides, os.environ)
    print(dump_toml(resolved.recipe, resolved.origins))
    print("\n".join(world_map(resolved, gpus=len(list(Path("/dev").glob(GPU_FILES))))))
    for warning in resolved.warnings:
        print(f"\nwarning: {warning}")
    print("\nThe recipe is valid.")
    return 0


def world_map(resolved: Resolved, gpus: int) -> Iterator[str]:
    """Lines of text: the roles of the run, the process and device of each, and the work of one step."""
    recipe = resolved.recipe
    device = _device(recipe, gpus)
    roles = [
        "learner",
        *(["critic"] if resolved.row.has_critic else []),
        *(["reference"] if recipe.algorithm.beta else []),
        *(["scorer"] if recipe.reward.model else []),
    ]
    servers = _servers(recipe)
    started = 0 if recipe.engine.url else len(servers)
    count = f"{len(servers)} vLLM server{'s' * (len(servers) > 1)}" if servers else "no server"
    ranks = world_size(recipe)
    alone, collectors = recipe.run.launcher == "local", recipe.run.collectors
    all_ranks = ("main" if alone else "learner") if ranks == 1 else f"ranks 0-{ranks - 1}"
    first = all_ranks if ranks == 1 else "rank 0"
    processes = ranks + started + (0 if alone else 1 + collectors)
    yield f"World map: {processes} process{'es' * (processes > 1)}, {count}"
    yield f"  {'role':<12}{'process':<12}{'device':<12}what"
    for role in roles:
        yield f"  {role:<12}{all_ranks:<12}{device:<12}{_what(role, resolved)}"
    if not servers and not resolved.row.recorded:
        later = "; vLLM servers from the crossover on (auto)" if recipe.engine.kind == "auto" else ""
        yield f"  {'engine':<12}{all_ranks:<12}{device:<12}inprocess, with the learner's own weights{later}"
    for name, place in servers:
        yield f"  {'engine':<12}{name:<12}{place or device:<11} vllm, with a copy of the weights, renewed at each version"
    if alone:
        yield f"  {'collector':<12}{first if servers else all_ranks:<12}{'cpu':<12}{_source(resolved)}"
    for number in range(0 if alone else collectors):
        what = f"{recipe.engine.kind}, with a copy of the weights; {_source(resolved)}"
        yield f"  {'collector':<12}{f'collector-{number}':<12}{device:<12}{what}"
    yield f"  {'buffer':<12}{_buffer(recipe, first if alone else 'buffer')}"
    yield ""
    yield from _work(recipe, resolved.row)


def _servers(recipe: Recipe) -> list[tuple[str, str]]:
    """(process, place) of each vLLM server; the place is empty where it is this machine."""
    if recipe.engine.kind != "vllm":
        return []
    return [("running", url) for url in recipe.engine.url] or [(f"vllm-{i}", "") for i in range(recipe.engine.servers)]


def _buffer(recipe: Recipe, first: str) -> str:
    if recipe.buffer.url is not None:
        return f"{'elsewhere':<12}{'disk':<12}run {recipe.buffer.run} at {recipe.buffer.url}"
    if recipe.buffer.ledger != "sqlite":
        return f"{first:<12}{'server':<12}run {recipe.buffer.run} in PostgreSQL"
    return f"{first:<12}{'disk':<12}ledger.sqlite in the run directory"


def _device(recipe: Recipe, gpus: int) -> str:
    if recipe.run.device != "auto":
        return recipe.run.device
    return "cuda" if gpus else "cpu"


def _what(role: str, resolved: Resolved) -> str:
    recipe = resolved.recipe
    if role == "learner":
        fact = resolved.facts.get("model.name")
        weights = f", adapter of rank {recipe.lora.rank} on the frozen base" if recipe.lora.rank else ""
        weights += f", from {recipe.lora.path}" if recipe.lora.path else ""
        return f"{recipe.model.name}{f' ({fact})' if fact else ''}, {recipe.learner.param_dtype}, {recipe.algorithm.name}{weights}"
    start = f", from {recipe.learner.critic_model}" if recipe.learner.critic_model else ""
    if role == "critic" and recipe.lora.rank and recipe.lora.critic == "adapter":
        return f"adapter and value head on the same base{start}"
    if role == "scorer":
        if recipe.reward.model_place == "learner":
            return f"{recipe.reward.model}, a frozen adapter and head on the same base, scores before each update"
        return f"{recipe.reward.model}, scores answers while they are collected"
    if role == "critic":
        return f"value head on a trunk of its own{start or ', which starts as the actor does'}"
    weights = "frozen" if not recipe.lora.rank else recipe.lora.path or "the base without adapters"
    return f"{weights}, KL in the {recipe.algorithm.kl_place or 'loss'} with beta {recipe.algorithm.beta:g}"


def _source(resolved: Resolved) -> str:
    fact = resolved.facts.get("data.source")
    return f"{resolved.recipe.data.source}{f' ({fact})' if fact else ''}"


def _work(recipe: Recipe, row: AlgorithmRow) -> Iterator[str]:
    groups, size = recipe.algorithm.groups_per_step, recipe.rollout.group_size
    updates = recipe.learner.epochs * recipe.learner.minibatches
    steps = f"{recipe.algorithm.steps} steps" if recipe.algorithm.steps else f"{recipe.data.epochs} epochs of the data"
    work = f"{groups} {row.data}" if row.recorded else f"{groups} prompts x {size} samples = {groups * size} samples"
    yield f"{steps}; each: {work}, {updates} update{'s' * (updates > 1)}"
    if recipe.eval.rows or recipe.eval.source:
        every = f", every {recipe.eval.every} steps" if recipe.eval.every else ""
        times = "" if row.recorded else f" x {recipe.eval.samples} samples"
        yield f"evaluation: {recipe.eval.rows} held-out rows{times} before the first step{every} and at the end"
