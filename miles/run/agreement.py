"""Engine and learner side by side: the same tokens, the same version, after the weights have moved once."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from miles.config.schema import Recipe
from miles.env.trajectory import first_segment
from miles.learn.learner import Learner
from miles.protocols import Engine
from miles.publish.canary import Tolerance
from miles.run.diagnosis import Answer, Diagnosis, diagnose
from miles.run.engines import open_rollouts
from miles.run.prepare import Inputs
from miles.run.vllm import serving_dtype
from miles.types import Completion, Group, Sample

SHOWN = 12  # tokens
STEP = 0.05  # of a parameter's size
SMALLEST = 0.02  # size that a parameter is moved by at least a part of: an adapter's second half begins at zero


def compare_engine(recipe: Recipe, inputs: Inputs, model: Any, learner: Learner) -> tuple[Diagnosis, list[Group]]:
    """Start the recipe's engine, let it answer, give it a new version, let it answer the same prompts, and compare those.

    The publish is not verified: what differs is to be seen here. Raises ConfigError and EngineError where there is no engine.
    """
    trusting = recipe.model_copy(update={"publish": recipe.publish.model_copy(update={"verify": False})})
    with (
        tempfile.TemporaryDirectory(prefix="miles-doctor-") as folder,
        open_rollouts(trusting, inputs, model, learner, Path(folder), None) as rollouts,
    ):
        assert rollouts.engine is not None
        asyncio.run(sample_groups(rollouts.engine, inputs, learner.version))
        before = deepcopy(learner.model)
        move(learner)
        rollouts.publisher.publish(learner.policy_update())
        groups = asyncio.run(sample_groups(rollouts.engine, inputs, learner.version))
    return judge(recipe, learner, before, groups), groups


def move(learner: Learner) -> None:
    """The next version: every trained parameter moves by a part of its size, so that older ones cannot pass for it."""
    learner.version += 1
    generator = torch.Generator().manual_seed(learner.version)
    with torch.no_grad():
        for parameter in learner.roles.trained("actor").values():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.add_(STEP * max(SMALLEST, parameter.square().mean().sqrt().item()) * noise)


async def sample_groups(engine: Engine, inputs: Inputs, version: int, prompts: int = 2, n: int = 4) -> list[Group]:
    """Real completions of the first prompts, with rewards that differ, so that there is something to train on."""
    rendered = [inputs.renderer.prompt(row).ids for row in inputs.train[:prompts]]
    answers = [
        engine.generate(ids, n, inputs.sampling, [10 * p + i for i in range(n)], version)
        for p, ids in enumerate(rendered)
    ]
    results = await asyncio.gather(*answers)
    return [
        Group(p, p, tuple(_sample(ids, completion, i) for i, completion in enumerate(completions)))
        for p, (ids, completions) in enumerate(zip(rendered, results, strict=True))
    ]


def judge(recipe: Recipe, learner: Learner, before: Any, groups: Sequence[Group]) -> Diagnosis:
    """The groups hold the engine's log-probabilities; `before` is a copy of the learner's model at the version before."""
    ours = learner.logprobs(learner.pack(groups)).tolist()
    return diagnose(
        [_answer(sample) for group in groups for sample in group.samples], ours, learner.model, before,
        temperature=recipe.rollout.temperature, tolerance=Tolerance.of(serving_dtype(recipe)),
    )  # fmt: skip


def print_agreement(found: Diagnosis, tokens: Sequence[int], tokenizer: Any) -> None:
    """The table of the first tokens, the worst difference of all of them, and the likely cause."""
    cause = found.cause
    print(f"\n{'token':<16}{'engine':>10}{'learner':>10}{'difference':>12}" + (f"{'cause':>10}" if cause else ""))
    for place, token in enumerate(tokens[:SHOWN]):
        a, b = found.engine[place], found.right.logprobs[place]
        shown = f"{cause.logprobs[place]:>10.5f}" if cause else ""
        print(f"{tokenizer.decode([token])!r:<16}{a:>10.5f}{b:>10.5f}{b - a:>12.1e}{shown}")
    difference = found.right.difference
    verdict = "" if found.agrees else ", more than rounding"
    print(f"worst difference of {len(tokens)} tokens: {difference.worst:.1e} nat, mean {difference.mean:.1e}{verdict}")
    if cause is not None:
        print(f"likely cause: {cause.name}; that leaves {cause.difference.mean:.1e} nat on average. {cause.way_out}")
    elif not found.agrees:
        print(
            "no known cause gives the engine's numbers: another model or revision, or an engine that does not run it exactly"
        )


def sampled_tokens(groups: Sequence[Group]) -> list[int]:
    """In the order of a step's table."""
    segments = [segment for group in groups for sample in group.samples for segment in sample.segments]
    return [token for s in segments for token, mask in zip(s.token_ids, s.loss_mask, strict=True) if mask]


def _answer(sample: Sample) -> Answer:
    (segment,) = sample.segments
    start = segment.loss_mask.index(True)
    ids, logprobs = segment.token_ids[start:], segment.behavior_logprobs[start:]
    return Answer(tuple(segment.token_ids[:start]), Completion(tuple(ids), tuple(logprobs), (), sample.stop_reason))


def _sample(ids: Sequence[int], completion: Completion, place: int) -> Sample:
    return Sample((first_segment(ids, completion),), completion.stop_reason, "", reward=float(place % 2))
