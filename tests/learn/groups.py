"""Groups made by hand, and what plain transformers says about them: one sequence at a time, full logits, log-softmax."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from miles.config.schema import Recipe
from miles.learn.rows import Layout
from miles.learn.step import Step, build_step
from miles.types import Batch, Group, Sample, Segment

VOCABULARY = 28
SYSTEM = (1, 9, 4, 17, 6)

TREE = Layout(share=True, pack=True, tokens_per_batch=4096)
PACKED = Layout(share=False, pack=True, tokens_per_batch=4096)
SEPARATE = Layout(share=False, pack=False, tokens_per_batch=4096)


def recipe(**keys: Any) -> Recipe:
    """recipe(algorithm__name="ppo") sets algorithm.name."""
    sections: dict[str, dict[str, Any]] = {"algorithm": {"name": "grpo", "steps": 10}}
    for key, value in keys.items():
        section, name = key.split("__")
        sections.setdefault(section, {})[name] = value
    return Recipe.model_validate(sections)


def segment(turns: Sequence[tuple[Sequence[int], bool]], logprobs: Sequence[float] = ()) -> Segment:
    """From (tokens, trained) turns; logprobs of the trained tokens, -1 each where there are none."""
    ids = [token for tokens, _ in turns for token in tokens]
    mask = [trained for tokens, trained in turns for _ in tokens]
    given = iter(logprobs or [-1.0] * sum(mask))
    return Segment(
        tuple(ids),
        tuple(mask),
        tuple(next(given) if trained else 0.0 for trained in mask),
        tuple(0 if trained else -1 for trained in mask),
    )


def sample(*segments: Segment, reward: float | None = 1.0, truncated: bool = False) -> Sample:
    return Sample(tuple(segments), "length" if truncated else "stop", text="", reward=reward)


def group(ordinal: int, samples: Sequence[Sample], baseline: float | None = None) -> Group:
    return Group(ordinal, ordinal, tuple(samples), baseline_reward=baseline)


def draw(
    count: int = 4, size: int = 4, seed: int = 0, prompt: int = 9, longest: int = 8, symbols: int = VOCABULARY
) -> list[Group]:
    """Groups whose prompts share a system prompt; completions of few symbols, so some begin alike and some are equal.

    Every third sample has a second turn after a gap of environment tokens, every fifth a second segment.
    """
    rng = random.Random(seed)

    def tokens(n: int, low: int = 3, high: int = symbols) -> list[int]:
        return [rng.randrange(low, high) for _ in range(n)]

    out, serial = [], 0
    for ordinal in range(count):
        question = [*SYSTEM, *tokens(rng.randint(2, prompt - 3))]
        samples = []
        for _ in range(size):
            turns = [(question, False), (tokens(rng.randint(1, longest), 3, 6), True)]
            if serial % 3 == 1:
                turns += [(tokens(rng.randint(1, 4)), False), (tokens(rng.randint(1, longest)), True)]
            segments = [segment(turns)]
            if serial % 5 == 2:
                segments.append(segment([(tokens(7), False), (tokens(3), True), (tokens(2), False)]))
            samples.append(sample(*segments, reward=float(rng.random() < 0.5)))
            serial += 1
        out.append(group(ordinal, samples))
    return out


def measured(model: Any, groups: Sequence[Group], temperature: float = 1.0, noise: float = 0.0) -> list[Group]:
    """The groups with behavior log-probabilities under the model, moved by up to `noise`."""
    rng = random.Random(1)

    def measure(part: Segment) -> Segment:
        with torch.no_grad():
            found = plain_logprobs(model, part, temperature)[0].tolist()
        values = iter(value + noise * rng.uniform(-1, 1) for value in found)
        return replace(part, behavior_logprobs=tuple(next(values) if m else 0.0 for m in part.loss_mask))

    return [
        replace(g, samples=tuple(replace(s, segments=tuple(measure(p) for p in s.segments)) for s in g.samples))
        for g in groups
    ]


def plain_logprobs(model: Any, part: Segment, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """([trained] log-probabilities, [trained] entropies) of one segment on its own."""
    ids = torch.tensor([part.token_ids])
    logp = torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / temperature, -1)
    places = torch.tensor(np.flatnonzero(part.loss_mask))
    before = logp[places - 1]
    return before.gather(1, ids[0, places, None]).squeeze(1), -(before.exp() * before).sum(1)


def plain_table(model: Any, groups: Sequence[Group], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """[N] each, in the order of the step's table."""
    parts = [
        plain_logprobs(model, part, temperature)
        for g in groups
        for s in g.samples
        if s.reward is not None
        for part in s.segments
        if part.num_trained
    ]
    return torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])


def step(groups: Sequence[Group], settings: Recipe | None = None) -> Step:
    settings = recipe() if settings is None else settings
    return build_step(groups, 0, settings.reward, settings.rollout.max_new_tokens)


def in_table(values: Sequence[Tensor], batches: Sequence[Batch], count: int) -> Tensor:
    """[T] of each batch -> [N]."""
    out = torch.full((count,), float("nan"))
    for value, batch in zip(values, batches, strict=True):
        out = out.index_put((batch.slots[batch.loss_mask],), value[batch.loss_mask])
    return out


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Of gradients, relative to the largest entry of each tensor."""
    assert a.keys() == b.keys()
    return max(((a[name] - b[name]).abs().max() / b[name].abs().max().clamp(min=1e-12)).item() for name in b)
